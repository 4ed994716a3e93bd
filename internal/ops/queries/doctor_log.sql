-- Marks that retention should have deleted: of each part it keeps only one of those older than $1.
SELECT (SELECT coalesce(pg_catalog.sum(n - 1), 0)::bigint
        FROM (SELECT count(*) AS n FROM outbox_mark WHERE settled IS NOT NULL
            AND at < clock_timestamp() - $1::interval GROUP BY part) p),
       (SELECT pg_catalog.min(at) FROM outbox_mark WHERE settled IS NOT NULL AND epoch > 0)
