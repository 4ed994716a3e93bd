-- Posthaste's tables and views ($1) that are there, with their partitions; and without these.
WITH named AS MATERIALIZED (
    SELECT pg_catalog.to_regclass(t)::oid AS oid FROM pg_catalog.unnest($1::text[]) AS t
)
SELECT coalesce(pg_catalog.array_agg(c.oid::regclass::text), '{}'),
    coalesce(pg_catalog.array_agg(c.oid::regclass::text) FILTER (WHERE c.oid IN (SELECT oid FROM named)), '{}')
FROM pg_class c
WHERE c.oid IN (SELECT oid FROM named)
   OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid AND i.inhparent IN (SELECT oid FROM named))
