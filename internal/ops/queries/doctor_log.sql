-- Whether the index by which owed rows are found is there and valid, and how many marks retention has left behind: of
-- a part it keeps one of those older than $1, and needs no other.
SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('outbox_owed')::oid AND indisvalid),
       (SELECT coalesce(pg_catalog.sum(n - 1), 0)::bigint
        FROM (SELECT count(*) AS n FROM outbox_mark WHERE settled IS NOT NULL
            AND at < clock_timestamp() - $1::interval GROUP BY part) p),
       (SELECT pg_catalog.min(at) FROM outbox_mark WHERE settled IS NOT NULL AND epoch > 0)
