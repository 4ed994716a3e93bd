-- For rows of the log, by part and number, the mark that settled them, of those after $3 up to $4; oldest first.
SELECT m.id, m.at, o.part, o.seq, o.id, o.aggregate_id, o.event_type,
    outbox_stream_name(m.prefix, o.aggregate_type, o.part, m.shards), m.prefix || o.aggregate_type
FROM unnest($1::smallint[], $2::bigint[]) AS u(part, seq)
JOIN outbox_live o ON o.part = u.part AND o.seq = u.seq
CROSS JOIN LATERAL outbox_settling(o.part, o.xid, o.seq) m
WHERE m.id > $3 AND m.id <= $4
ORDER BY m.id, o.part, o.seq
