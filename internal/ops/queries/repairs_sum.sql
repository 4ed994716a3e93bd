-- The time of the last finished repair, with or without changes, and the number of phantoms found within a day.
SELECT pg_catalog.max(done_at),
    coalesce(pg_catalog.sum(phantoms) FILTER (WHERE done_at > clock_timestamp() - interval '1 day'), 0)::bigint
FROM outbox_repair
