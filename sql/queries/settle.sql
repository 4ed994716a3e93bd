-- Deletes published rows, and answers with their places in the arrays. A row is known by its number and its id: numbers are
-- used again after a TRUNCATE ... RESTART IDENTITY, or a failover. part is a generated column, which pgoutput does not send,
-- so it is computed again from the aggregate id.
WITH gone AS (
    DELETE FROM outbox o
    USING unnest($1::text[], $2::bigint[], $3::uuid[], $4::text[], $5::text[], $6::timestamptz[]) WITH ORDINALITY
        AS k(aggregate_id, seq, id, stream, entry_id, event_time, n)
    WHERE o.part = (pg_catalog.hashtextextended(k.aggregate_id, 0) & 15::bigint)::smallint AND o.seq = k.seq AND o.id = k.id
    RETURNING k.n, o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
        CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE clock_timestamp() END AS created_at, k.stream, k.entry_id, k.event_time
), receipt AS (
    INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode, event_time)
    SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, clock_timestamp(), stream, nullif(entry_id, ''), 'cdc', event_time
    FROM gone WHERE $7::boolean
)
SELECT pg_current_snapshot()::text, coalesce(pg_catalog.array_agg(n), '{}') FROM gone
