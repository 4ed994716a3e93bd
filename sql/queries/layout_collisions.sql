-- Names of streams that two types would have if each had $1: the type, and the stream of another one. At most ten. A
-- stream that was dropped, and was not published to since, does not count: see stream_note.
SELECT b.base, s.stream
FROM outbox_stream b
CROSS JOIN pg_catalog.generate_series(0, $1::integer - 1) AS p(n)
JOIN outbox_stream s ON s.stream = b.base || CASE WHEN $1::integer > 1 THEN '.'::text || p.n::text ELSE ''::text END
WHERE s.base <> b.base
  AND (s.dropped_at IS NULL OR EXISTS (
      SELECT FROM outbox_mark m WHERE m.at > s.dropped_at AND pg_catalog.jsonb_exists(m.entries, s.stream)))
ORDER BY 1, 2 LIMIT 10
