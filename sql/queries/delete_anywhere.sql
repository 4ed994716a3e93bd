-- As settle, but in every part: the last look for a row that is not where its aggregate id says. LIMIT makes each look a
-- probe of the index; joined, the planner may read every part for it. What is found is deleted by its key, not by its place:
-- somebody may update it in between.
WITH found AS MATERIALIZED (
    SELECT o.part, k.*
    FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[]) WITH ORDINALITY AS k(seq, id, stream, entry_id, event_time, n),
        pg_catalog.generate_series(0, 15) AS p(part),
        LATERAL (SELECT part FROM outbox WHERE part = p.part::smallint AND seq = k.seq AND id = k.id LIMIT 1) o
), gone AS (
    DELETE FROM outbox o USING found k WHERE o.part = k.part AND o.seq = k.seq AND o.id = k.id
    RETURNING k.n, o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
        CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE clock_timestamp() END AS created_at, k.stream, k.entry_id, k.event_time
), receipt AS (
    INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode, event_time)
    SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, clock_timestamp(), stream, nullif(entry_id, ''), 'cdc', event_time
    FROM gone WHERE $6::boolean
)
SELECT pg_current_snapshot()::text, coalesce(pg_catalog.array_agg(n), '{}') FROM gone
