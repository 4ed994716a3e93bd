-- The open repairs by stream, and those finished within a day that have changed something.
SELECT stream, pg_catalog.min(noticed_at), done_at, pg_catalog.max(expected), pg_catalog.sum(restored)::bigint,
    pg_catalog.sum(recalled)::bigint, pg_catalog.sum(phantoms)::bigint
FROM outbox_repair
WHERE done_at IS NULL OR done_at > clock_timestamp() - interval '1 day'
GROUP BY stream, done_at
HAVING done_at IS NULL OR pg_catalog.sum(restored + recalled + phantoms) > 0::numeric
ORDER BY done_at DESC NULLS FIRST, pg_catalog.min(noticed_at), stream LIMIT 50
