-- In the order of outbox.Report: by stream, what is compared, what is missing, and what was found within a day.
WITH report AS (
    SELECT stream, pg_catalog.min(noticed_at) AS noticed, done_at, pg_catalog.max(expected) AS expected,
        pg_catalog.sum(restored)::bigint AS restored, pg_catalog.sum(recalled)::bigint AS recalled,
        CASE WHEN pg_catalog.bool_or(lacks < 0) THEN -1 ELSE pg_catalog.sum(lacks) END::bigint AS missing,
        pg_catalog.sum(refused)::bigint AS refused, pg_catalog.sum(phantoms)::bigint AS phantoms,
        pg_catalog.min(first_at) FILTER (WHERE lacks <> 0) AS first,
        pg_catalog.max(last_at) FILTER (WHERE lacks <> 0) AS last
    FROM outbox_reconcile CROSS JOIN LATERAL (
        SELECT CASE WHEN told AND replayed_at IS NULL THEN coalesce(missing, 0) ELSE 0 END AS lacks) l
    WHERE done_at IS NULL OR done_at > clock_timestamp() - interval '1 day' OR lacks <> 0
    GROUP BY stream, done_at
)
SELECT * FROM report
WHERE done_at IS NULL OR missing <> 0 OR restored + recalled + refused + phantoms > 0
ORDER BY done_at IS NOT NULL, missing = 0, done_at DESC, noticed, stream LIMIT 100
