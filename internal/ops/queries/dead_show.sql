-- The dead event $1 of the relay, with its payload if $2 is set. The payload is NULL if its row could not be read.
SELECT 'relay', d.id, d.aggregate_type, d.aggregate_id, d.event_type::text, d.class, d.error, d.attempts,
    outbox_time(d.created_at), d.dead_at, d.retry_seq IS NOT NULL,
    coalesce((SELECT outbox_stream_name(l.prefix, d.aggregate_type, outbox_part(d.aggregate_id), l.shards)
        FROM outbox_layout l), ''), '',
    ARRAY(SELECT k FROM pg_catalog.jsonb_object_keys(
        CASE pg_catalog.jsonb_typeof(d.headers) WHEN 'object' THEN d.headers ELSE '{}'::jsonb END) k ORDER BY k),
    coalesce(pg_catalog.octet_length(d.payload::text), -1), CASE WHEN $2::boolean THEN d.payload END
FROM outbox_dead d WHERE d.id = $1 AND d.dropped_at IS NULL
