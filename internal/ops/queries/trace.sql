-- $1 is the id as text, $2 the same as a UUID, or NULL if it is none; the newest $3 of what there is, because an aggregate may have any
-- number of events. aggregate_id has no index in outbox: its part is computed, so that only a sixteenth of it is read.
SELECT * FROM (
SELECT created_at AS at, 'order', id::text, amount || ' ' || currency || ' ' || status, '', '', ''
FROM orders WHERE id = $2::uuid
UNION ALL
SELECT created_at, 'outbox', id::text, event_type || ' waits to be published', coalesce(headers ->> 'traceparent', ''), '', ''
FROM outbox WHERE (part = (hashtextextended($1::text, 0) & 15)::smallint AND aggregate_id = $1::text) OR id = $2
UNION ALL
SELECT published_at, 'published', id::text, event_type || ' by ' || mode || ', ' ||
       round(extract(epoch FROM published_at - created_at)::numeric * 1000, 1) || ' ms after its insert',
       coalesce(headers ->> 'traceparent', ''), stream, coalesce(entry_id, '')
FROM outbox_history WHERE aggregate_id = $1::text OR id = $2
UNION ALL
SELECT dead_at, 'dead', id::text, event_type || ': ' || error, coalesce(headers ->> 'traceparent', ''), '', ''
FROM outbox_dead WHERE aggregate_id = $1::text OR id = $2
ORDER BY 1 DESC LIMIT $3
) newest ORDER BY at
