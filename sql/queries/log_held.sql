-- The row of an event in the log, if a mark after $2 up to $3 has settled it.
SELECT m.id, m.at, o.part, o.seq, o.id, o.aggregate_id, o.event_type,
    outbox_stream_name(m.prefix, o.aggregate_type, o.part, m.shards), m.prefix || o.aggregate_type
FROM outbox_live o CROSS JOIN LATERAL outbox_settling(o.part, o.xid, o.seq) m
WHERE o.id = $1 AND m.id > $2 AND m.id <= $3
