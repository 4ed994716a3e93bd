-- The time, roughly when the oldest event in history was settled (NULL without one), and whether this is a standby.
SELECT clock_timestamp(), (
    SELECT m.at FROM outbox_mark m
    WHERE m.settled IS NOT NULL AND greatest(m.hi, m.cursor) >= (
        SELECT pg_catalog.min(o.seq) FROM pg_catalog.generate_series(0, 15) AS p(part)
        CROSS JOIN LATERAL (SELECT seq FROM outbox_rows WHERE part = p.part::smallint ORDER BY seq LIMIT 1) o)
    ORDER BY m.id LIMIT 1
), pg_is_in_recovery()
