-- Names of streams that two types would have if each had $1: one that is there, and one that there would be. By type, at most ten.
SELECT coalesce(b.base, b.stream), s.stream
FROM outbox_stream b
CROSS JOIN pg_catalog.generate_series(0, $1::integer - 1) AS p(n)
JOIN outbox_stream s ON s.stream = coalesce(b.base, b.stream) || CASE WHEN $1::integer > 1 THEN '.'::text || p.n::text ELSE ''::text END
WHERE coalesce(s.base, s.stream) <> coalesce(b.base, b.stream)
ORDER BY 1, 2 LIMIT 10
