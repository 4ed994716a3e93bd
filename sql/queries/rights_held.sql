-- Posthaste's tables ($1) that are there, and their partitions.
SELECT coalesce(pg_catalog.array_agg(c.oid::regclass::text), '{}') FROM pg_class c
WHERE c.oid = ANY (ARRAY(SELECT pg_catalog.to_regclass(t)::oid FROM pg_catalog.unnest($1::text[]) AS t))
   OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid
              AND i.inhparent = ANY (ARRAY(SELECT pg_catalog.to_regclass(t)::oid FROM pg_catalog.unnest($1::text[]) AS t)))
