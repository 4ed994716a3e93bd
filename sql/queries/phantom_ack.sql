-- Ends the notice of all phantoms, and returns them in the order of phantom_list.
WITH acked AS (
    UPDATE outbox_phantom SET acked_at = clock_timestamp() WHERE acked_at IS NULL RETURNING *
)
SELECT stream, entry_id, id, noticed_at, acked_at FROM acked
ORDER BY noticed_at DESC, stream, pg_catalog.split_part(entry_id, '-', 1)::numeric,
    pg_catalog.split_part(entry_id, '-', 2)::numeric
