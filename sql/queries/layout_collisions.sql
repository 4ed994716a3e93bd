-- Names of streams that two types would have if each had $1: one that is there, and one that there would be. By type, at most ten. A
-- stream that was dropped, and was not published to since, is nobody's: see stream_note.
SELECT coalesce(b.base, b.stream), s.stream
FROM outbox_stream b
CROSS JOIN pg_catalog.generate_series(0, $1::integer - 1) AS p(n)
JOIN outbox_stream s ON s.stream = coalesce(b.base, b.stream) || CASE WHEN $1::integer > 1 THEN '.'::text || p.n::text ELSE ''::text END
WHERE coalesce(s.base, s.stream) <> coalesce(b.base, b.stream)
  AND (s.dropped_at IS NULL OR EXISTS (SELECT FROM outbox_mark m WHERE m.at > s.dropped_at AND pg_catalog.jsonb_exists(m.entries, s.stream)))
ORDER BY 1, 2 LIMIT 10
