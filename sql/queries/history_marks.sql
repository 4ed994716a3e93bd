-- By part the newest mark written up to $1, 0 for none: its rows were settled by then. The search begins at the oldest
-- mark, because the marks before the result are deleted when it is used. Where there are more than 10,000, a later
-- call continues.
WITH every AS MATERIALIZED (
    SELECT pg_catalog.max(id) AS id FROM (
        SELECT id, at FROM outbox_mark WHERE part >= -1 AND part <= -1 AND settled IS NOT NULL
        ORDER BY part, id LIMIT 10000) k
    WHERE k.at <= $1
)
SELECT pg_catalog.array_agg(coalesce(greatest(every.id, (
        SELECT pg_catalog.max(k.id) FROM (
            SELECT id, at FROM outbox_mark
            WHERE part >= p.part::smallint AND part <= p.part::smallint AND settled IS NOT NULL
            ORDER BY part, id LIMIT 10000) k
        WHERE k.at <= $1)), 0) ORDER BY p.part)
FROM every, pg_catalog.generate_series(0, 15) AS p(part)
