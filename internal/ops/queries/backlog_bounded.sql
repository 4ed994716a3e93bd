-- How many events wait, $1 at most, and how long the oldest. Where more wait, the oldest is that of those that were counted and of the
-- first of each part, which the primary key finds: the next to be swept.
WITH counted AS MATERIALIZED (SELECT created_at FROM outbox LIMIT $1),
     first AS (SELECT f.created_at FROM pg_catalog.generate_series(0, 15) AS p,
               LATERAL (SELECT created_at FROM outbox WHERE part = p::smallint ORDER BY seq LIMIT 1) f)
SELECT (SELECT count(*) FROM counted),
       coalesce(extract(epoch FROM clock_timestamp() -
           least((SELECT pg_catalog.min(created_at) FROM counted WHERE pg_catalog.isfinite(created_at)), (SELECT pg_catalog.min(created_at) FROM first WHERE pg_catalog.isfinite(created_at)))), 0)::float8
