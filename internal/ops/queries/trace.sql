-- $1 is the id as text, $2 the same as a UUID, or NULL. Returns the newest $3 rows, because an aggregate may have any
-- number of events. The log has no index for aggregates: the part is read. The last columns are an entry that the
-- event's entry is not after, the event's creation time, an entry that its restored entry is not after ('+' while a
-- repair is under way), when the loss was noticed, and the event's type.
SELECT at, place, id, outbox_readable(detail), outbox_readable(traceparent), stream, up_to, created, restored, since,
    outbox_readable(event_type)
FROM (
SELECT coalesce(m.at, outbox_time(o.created_at)) AS at,
    CASE WHEN m.at IS NULL THEN 'waiting' ELSE 'settled' END, o.id::text,
    CASE WHEN m.at IS NULL THEN 'not published yet'
        ELSE 'by ' || m.mode || ', ' || pg_catalog.round(
            extract(epoch FROM m.at - outbox_time(o.created_at))::numeric * 1000::numeric, 1)::text
            || ' ms after its insert' END,
    coalesce(o.headers ->> 'traceparent'::text, ''), CASE WHEN m.at IS NULL THEN '' ELSE s.stream END,
    coalesce(m.entries ->> s.stream, ''),
    outbox_time(o.created_at), coalesce(again.restored, ''),
    coalesce(again.since, m.at, outbox_time(o.created_at)), o.event_type::text
FROM (
    (SELECT * FROM outbox_live
     WHERE part = outbox_part($1::text) AND aggregate_id = $1::text
     ORDER BY seq DESC LIMIT $3)
    UNION ALL
    SELECT * FROM outbox_live WHERE id = $2
) o
LEFT JOIN LATERAL outbox_settling(o.part, o.xid, o.seq) m ON true
CROSS JOIN LATERAL (
    SELECT coalesce(outbox_stream_name(m.prefix, o.aggregate_type, o.part, m.shards), '') AS stream
) s
LEFT JOIN LATERAL (
    SELECT (pg_catalog.array_agg(coalesce(nullif(r.last_entry, ''::text), '+') ORDER BY r.id DESC))[1] AS restored,
        pg_catalog.min(r.noticed_at) AS since
    FROM outbox_reconcile r WHERE r.stream = s.stream AND r.touched_mark < m.id
) again ON true
UNION ALL
SELECT dead_at, 'dead', id::text, error, coalesce(headers ->> 'traceparent'::text, ''), '', '',
    outbox_time(created_at), '', dead_at, event_type::text
FROM outbox_dead WHERE (aggregate_id = $1::text OR id = $2) AND dropped_at IS NULL
ORDER BY 1 DESC LIMIT $3
) newest(at, place, id, detail, traceparent, stream, up_to, created, restored, since, event_type)
ORDER BY at
