-- As settle, but in every part: the last look for a row that is not where its aggregate id says. LIMIT makes each look a
-- probe of the index; joined, the planner may read every part for it.
WITH found AS MATERIALIZED (
    SELECT o.ctid, k.stream, k.entry_id, k.event_time
    FROM unnest($1::bigint[], $2::text[], $3::text[], $5::timestamptz[]) AS k(seq, stream, entry_id, event_time), generate_series(0, 15) AS p(part),
        LATERAL (SELECT ctid FROM outbox WHERE part = p.part::smallint AND seq = k.seq LIMIT 1) o
), gone AS (
    DELETE FROM outbox o USING found k WHERE o.ctid = k.ctid
    RETURNING o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
        CASE WHEN isfinite(o.created_at) THEN o.created_at ELSE clock_timestamp() END AS created_at, k.stream, k.entry_id, k.event_time
), receipt AS (
    INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode, event_time)
    SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, clock_timestamp(), stream, nullif(entry_id, ''), 'cdc', event_time
    FROM gone WHERE $4::boolean
)
SELECT pg_current_snapshot()::text, coalesce(array_agg(seq), '{}') FROM gone
