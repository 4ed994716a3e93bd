-- 1 without a mark of a relay: the mark of the migration has a negative id.
SELECT greatest(pg_catalog.max(id), 1::bigint) FROM outbox_mark WHERE settled IS NOT NULL
