-- What the log has of a range of marks ($1, $2), by stream; $3 is the only part, or -1. $7: of all streams of the type
-- that $6 names. Between two marks it goes by transactions, as
-- log_list does; in a table that was restored from another server, all of a part is looked at. The times are those of the first
-- marks that can hold the first and the last number. A row's stream is that of the layout it was published under.
SELECT c.stream, c.events,
       coalesce((SELECT at FROM outbox_mark WHERE id > $1 AND settled IS NOT NULL AND greatest(hi, cursor) >= c.first ORDER BY id LIMIT 1), pg_catalog.to_timestamp(0)),
       coalesce((SELECT at FROM outbox_mark WHERE id > $1 AND settled IS NOT NULL AND greatest(hi, cursor) >= c.last ORDER BY id LIMIT 1), pg_catalog.to_timestamp(0)),
       c.created
FROM (
    SELECT s.stream, count(*) AS events, pg_catalog.min(o.seq) AS first, pg_catalog.max(o.seq) AS last,
           coalesce(pg_catalog.min(o.created_at) FILTER (WHERE pg_catalog.isfinite(o.created_at)), pg_catalog.to_timestamp(0)) AS created
    FROM pg_catalog.generate_series(0, 15) AS p(part)
    LEFT JOIN LATERAL (
        SELECT * FROM (
            (SELECT * FROM outbox_mark WHERE part >= p.part::smallint AND (part, id) <= (p.part::smallint, $1::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
            UNION ALL
            (SELECT * FROM outbox_mark WHERE part >= -1 AND (part, id) <= ((-1)::smallint, $1::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
        ) n ORDER BY id DESC LIMIT 1
    ) b ON true
    CROSS JOIN LATERAL (
        SELECT * FROM (
            (SELECT * FROM outbox_mark WHERE part >= p.part::smallint AND (part, id) <= (p.part::smallint, $2::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
            UNION ALL
            (SELECT * FROM outbox_mark WHERE part >= -1 AND (part, id) <= ((-1)::smallint, $2::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
        ) n ORDER BY id DESC LIMIT 1
    ) k
    CROSS JOIN LATERAL (
        SELECT r.*, r.since > r.until OR EXISTS (SELECT FROM outbox WHERE part = p.part::smallint AND xid = '3') AS restored
        FROM (SELECT coalesce(pg_catalog.pg_snapshot_xmax(b.settled), '3') AS since, ARRAY(SELECT pg_catalog.pg_snapshot_xip(b.settled)) AS running,
                     greatest(pg_catalog.pg_snapshot_xmax(k.settled), pg_catalog.pg_snapshot_xmax(k.pass)) AS until) r
    ) t
    CROSS JOIN LATERAL (
        SELECT * FROM outbox WHERE NOT t.restored AND part = p.part::smallint AND xid = ANY (t.running)
        UNION ALL
        SELECT * FROM outbox WHERE NOT t.restored AND part = p.part::smallint AND xid >= t.since AND xid < t.until
        UNION ALL
        SELECT * FROM outbox WHERE t.restored AND part = p.part::smallint
    ) o
    CROSS JOIN LATERAL (
        SELECT (SELECT prefix FROM relay_state) || o.aggregate_type || coalesce('.'::text || (o.part % nullif(coalesce(
            (SELECT l.shards FROM outbox_layout l WHERE o.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, l.settled) ORDER BY l.id LIMIT 1),
            (SELECT shards FROM relay_state)), 1::smallint))::text, ''::text) AS stream
    ) s
    WHERE ($3 < 0 OR p.part = $3)
      AND ((o.seq <= k.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, k.settled)) OR (o.seq <= k.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, k.pass)))
      AND ((o.seq <= b.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, b.settled)) OR (o.seq <= b.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, b.pass))) IS NOT TRUE
      AND ($4::text IS NULL OR o.aggregate_id = $4) AND ($5 = '' OR o.event_type::text = $5)
      AND ($6 = '' OR s.stream = $6 OR $7::boolean AND (SELECT prefix FROM relay_state) || o.aggregate_type = $6)
      AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq)
    GROUP BY s.stream
) c
ORDER BY 1
