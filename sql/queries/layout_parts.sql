-- The parts of aggregates.
SELECT pg_catalog.array_agg(outbox_part(a.id)::integer ORDER BY a.n)
FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS a(id, n)
