SELECT stream, entry_id, id, noticed_at, acked_at FROM outbox_phantom
ORDER BY noticed_at DESC, stream, pg_catalog.split_part(entry_id, '-', 1)::numeric,
    pg_catalog.split_part(entry_id, '-', 2)::numeric LIMIT $1
