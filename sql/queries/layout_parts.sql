-- The parts of aggregates.
SELECT pg_catalog.array_agg((pg_catalog.hashtextextended(a.id, 0) & 15::bigint)::integer ORDER BY a.n)
FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS a(id, n)
