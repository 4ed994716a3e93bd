-- The time, when the oldest event in history was published (NULL: there is none; of the log, when the first mark reached its least
-- number), and whether this is a standby.
SELECT clock_timestamp(), least(
    (SELECT pg_catalog.min(published_at) FROM outbox_history_old),
    (SELECT m.at FROM outbox_mark m
     WHERE m.settled IS NOT NULL AND greatest(m.hi, m.cursor) >= (
        SELECT pg_catalog.min(o.seq) FROM pg_catalog.generate_series(0, 15) AS p(part)
        CROSS JOIN LATERAL (SELECT seq FROM outbox WHERE part = p.part::smallint ORDER BY seq LIMIT 1) o)
     ORDER BY m.id LIMIT 1)
), pg_is_in_recovery()
