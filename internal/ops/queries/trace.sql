-- $1 is the id as text, $2 the same as a UUID, or NULL if it is none; the newest $3 of what there is, because an aggregate may have any
-- number of events. Neither has an index in the log: of an aggregate its part is read, and where an event is was searched
-- before ($4, $5: parts and numbers). The last columns say up to which entry an event of the log was published, and when it was created.
SELECT * FROM (
SELECT created_at AS at, 'order', id::text, amount::text || ' ' || currency::text || ' ' || status, '', '', '', '', created_at
FROM orders WHERE id = $2::uuid
UNION ALL
SELECT coalesce(m.at, CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE clock_timestamp() END), CASE WHEN m.at IS NULL THEN 'outbox' ELSE 'published' END, o.id::text,
       CASE WHEN m.at IS NULL THEN o.event_type::text || ' waits to be published'
            ELSE o.event_type::text || ' by ' || m.mode || ', settled ' || pg_catalog.round(extract(epoch FROM m.at - o.created_at)::numeric * 1000::numeric, 1)::text || ' ms after its insert' END,
       coalesce(o.headers ->> 'traceparent'::text, ''), CASE WHEN m.at IS NULL THEN '' ELSE s.stream END, '', coalesce(m.entries ->> s.stream, ''),
       CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE pg_catalog.to_timestamp(0) END
FROM (
    (SELECT * FROM outbox WHERE part = (pg_catalog.hashtextextended($1::text, 0) & 15::bigint)::smallint AND aggregate_id = $1::text ORDER BY seq DESC LIMIT $3)
    UNION ALL
    SELECT o.* FROM unnest($4::smallint[], $5::bigint[]) AS u(part, seq) JOIN outbox o ON o.part = u.part AND o.seq = u.seq
) o
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT prefix FROM relay_state) || o.aggregate_type || coalesce('.'::text || (o.part % nullif(coalesce(
        (SELECT l.shards FROM outbox_layout l WHERE o.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, l.settled) ORDER BY l.id LIMIT 1),
        (SELECT shards FROM relay_state)), 1::smallint))::text, ''::text), '') AS stream
) s
LEFT JOIN LATERAL (
    SELECT k.at, coalesce(k.mode, 'poll') AS mode, k.entries FROM (
        (SELECT id, at, mode, entries FROM outbox_mark
         WHERE part = o.part AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled) ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode, entries FROM outbox_mark
         WHERE part = -1 AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled) ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode, entries FROM outbox_mark
         WHERE part = o.part AND cursor >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, pass) ORDER BY cursor, id LIMIT 1)
    ) k ORDER BY k.id LIMIT 1
) m ON true
WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq)
UNION ALL
SELECT published_at, 'published', id::text, event_type::text || ' by ' || mode || ', ' ||
       pg_catalog.round(extract(epoch FROM published_at - created_at)::numeric * 1000::numeric, 1)::text || ' ms after its insert',
       coalesce(headers ->> 'traceparent'::text, ''), stream, coalesce(entry_id, ''), '', published_at
FROM outbox_history_old WHERE aggregate_id = $1::text OR id = $2
UNION ALL
SELECT dead_at, 'dead', id::text, event_type::text || ': ' || error, coalesce(headers ->> 'traceparent'::text, ''), '', '', '', dead_at
FROM outbox_dead WHERE (aggregate_id = $1::text OR id = $2) AND dropped_at IS NULL
ORDER BY 1 DESC LIMIT $3
) newest ORDER BY at
