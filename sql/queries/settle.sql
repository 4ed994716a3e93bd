-- part is a generated column, which pgoutput does not send, so it is computed again from the aggregate id.
WITH gone AS (
    DELETE FROM outbox o
    USING unnest($1::text[], $2::bigint[], $3::text[], $4::text[]) AS k(aggregate_id, seq, stream, entry_id)
    WHERE o.part = (hashtextextended(k.aggregate_id, 0) & 15)::smallint AND o.seq = k.seq
    RETURNING o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
        CASE WHEN isfinite(o.created_at) THEN o.created_at ELSE clock_timestamp() END AS created_at, k.stream, k.entry_id
), receipt AS (
    INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode)
    SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, clock_timestamp(), stream, nullif(entry_id, ''), 'cdc'
    FROM gone WHERE $5::boolean
)
SELECT pg_current_snapshot()::text, coalesce(array_agg(seq), '{}') FROM gone
