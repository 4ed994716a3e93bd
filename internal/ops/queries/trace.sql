-- $1 is the id as text, $2 the same as a UUID, or NULL if it is none; the newest $3 of what there is, because an aggregate may have any
-- number of events. aggregate_id has no index in outbox: its part is computed, so that only a sixteenth of it is read.
SELECT * FROM (
SELECT created_at AS at, 'order', id::text, amount::text || ' ' || currency::text || ' ' || status, '', '', ''
FROM orders WHERE id = $2::uuid
UNION ALL
SELECT created_at, 'outbox', id::text, event_type::text || ' waits to be published', coalesce(headers ->> 'traceparent'::text, ''), '', ''
FROM outbox WHERE (part = (pg_catalog.hashtextextended($1::text, 0) & 15::bigint)::smallint AND aggregate_id = $1::text) OR id = $2
UNION ALL
SELECT published_at, 'published', id::text, event_type::text || ' by ' || mode || ', ' ||
       pg_catalog.round(extract(epoch FROM published_at - created_at)::numeric * 1000::numeric, 1)::text || ' ms after its insert',
       coalesce(headers ->> 'traceparent'::text, ''), stream, coalesce(entry_id, '')
FROM outbox_history WHERE aggregate_id = $1::text OR id = $2
UNION ALL
SELECT dead_at, 'dead', id::text, event_type::text || ': ' || error, coalesce(headers ->> 'traceparent'::text, ''), '', ''
FROM outbox_dead WHERE aggregate_id = $1::text OR id = $2
ORDER BY 1 DESC LIMIT $3
) newest ORDER BY at
