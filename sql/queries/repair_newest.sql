SELECT coalesce(pg_catalog.max(id), 0) FROM outbox_mark WHERE settled IS NOT NULL
