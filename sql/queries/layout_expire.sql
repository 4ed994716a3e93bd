-- Forgets how many streams a type had when no row is left that was published then.
DELETE FROM outbox_layout l
WHERE l.ended_at < clock_timestamp() - greatest($1::interval, interval '72 hours') AND NOT EXISTS (
    SELECT FROM pg_catalog.generate_series(0, 15) AS p(part)
    CROSS JOIN LATERAL (SELECT o.seq FROM outbox o WHERE o.part = p.part::smallint ORDER BY o.seq LIMIT 1) f
    WHERE f.seq <= l.hi)
