-- Counts, by stream, what the marks after $1 up to $2 have settled; $3 is the only part, or -1. $7: of all streams of
-- the type that $6 names. Rows are found by their transactions, as in log_list; in a table that was restored from
-- another server, all rows of a part are read. The times are those of the first marks that can settle the first and
-- the last number. The layout is looked up for each row only where the marks have several.
WITH layouts AS MATERIALIZED (
    SELECT pg_catalog.count(DISTINCT (prefix, shards)) > 1 AS several FROM outbox_mark
    WHERE id > $1 AND id <= $2 AND settled IS NOT NULL
)
SELECT c.stream, c.events,
    coalesce((SELECT at FROM outbox_mark
        WHERE id > $1 AND settled IS NOT NULL AND greatest(hi, cursor) >= c.first ORDER BY id LIMIT 1),
        pg_catalog.to_timestamp(0)),
    coalesce((SELECT at FROM outbox_mark
        WHERE id > $1 AND settled IS NOT NULL AND greatest(hi, cursor) >= c.last ORDER BY id LIMIT 1),
        pg_catalog.to_timestamp(0)),
    c.created
FROM (
    SELECT outbox_stream_name(n.prefix, o.aggregate_type, o.part, n.shards) AS stream, count(*) AS events,
        pg_catalog.min(o.seq) AS first, pg_catalog.max(o.seq) AS last,
        coalesce(pg_catalog.min(o.created_at) FILTER (WHERE pg_catalog.isfinite(o.created_at)),
            pg_catalog.to_timestamp(0)) AS created
    FROM layouts y
    CROSS JOIN pg_catalog.generate_series(0, 15) AS p(part)
    LEFT JOIN LATERAL outbox_mark_until(p.part::smallint, $1::bigint) b ON true
    CROSS JOIN LATERAL outbox_mark_until(p.part::smallint, $2::bigint) k
    CROSS JOIN LATERAL (
        SELECT r.*, r.since > r.until OR EXISTS (
            SELECT FROM outbox_rows WHERE part = p.part::smallint AND xid = '3') AS restored
        FROM (
            SELECT coalesce(pg_catalog.pg_snapshot_xmax(b.settled), '3') AS since,
                ARRAY(SELECT pg_catalog.pg_snapshot_xip(b.settled)) AS running,
                greatest(pg_catalog.pg_snapshot_xmax(k.settled), pg_catalog.pg_snapshot_xmax(k.pass)) AS until
        ) r
    ) t
    CROSS JOIN LATERAL (
        SELECT * FROM outbox_live WHERE NOT t.restored AND part = p.part::smallint AND xid = ANY (t.running)
        UNION ALL
        SELECT * FROM outbox_live
        WHERE NOT t.restored AND part = p.part::smallint AND xid >= t.since AND xid < t.until
        UNION ALL
        SELECT * FROM outbox_live WHERE t.restored AND part = p.part::smallint
    ) o
    CROSS JOIN LATERAL (
        SELECT k.prefix, k.shards WHERE NOT y.several
        UNION ALL
        SELECT f.prefix, f.shards FROM outbox_settling(o.part, o.xid, o.seq) f WHERE y.several
    ) n
    WHERE ($3 < 0 OR p.part = $3)
      AND outbox_holds(k.settled, k.hi, k.pass, k.cursor, o.xid, o.seq)
      AND NOT outbox_holds(b.settled, b.hi, b.pass, b.cursor, o.xid, o.seq)
      AND ($4::text IS NULL OR o.aggregate_id = $4) AND ($5 = '' OR o.event_type::text = $5)
      AND ($6 = '' OR outbox_stream_name(n.prefix, o.aggregate_type, o.part, n.shards) = $6
           OR $7::boolean AND n.prefix || o.aggregate_type = $6)
    GROUP BY 1
) c
ORDER BY 1
