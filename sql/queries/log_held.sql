-- For rows of the log, by part and number, the mark that settled them, of those behind $3 up to $4; oldest first.
SELECT m.id, m.at, o.part, o.seq, o.id, o.aggregate_id, o.event_type, 
    (SELECT prefix FROM relay_state) || o.aggregate_type || coalesce('.'::text || (o.part % nullif(coalesce(
    (SELECT l.shards FROM outbox_layout l WHERE o.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, l.settled) ORDER BY l.id LIMIT 1),
    (SELECT shards FROM relay_state)), 1::smallint))::text, ''::text),
    (SELECT prefix FROM relay_state) || o.aggregate_type
FROM unnest($1::smallint[], $2::bigint[]) AS u(part, seq)
JOIN outbox o ON o.part = u.part AND o.seq = u.seq
CROSS JOIN LATERAL (
    SELECT k.id, k.at FROM (
        (SELECT id, at FROM outbox_mark
         WHERE part = o.part AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled) ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at FROM outbox_mark
         WHERE part = -1 AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled) ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at FROM outbox_mark
         WHERE part = o.part AND cursor >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, pass) ORDER BY cursor, id LIMIT 1)
    ) k ORDER BY k.id LIMIT 1
) m
WHERE m.id > $3 AND m.id <= $4 AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq)
ORDER BY m.id, o.part, o.seq
