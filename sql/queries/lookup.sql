-- The snapshot and the look-up are one statement, so that "no row" can be told from "not visible yet".
SELECT pg_current_snapshot()::text, coalesce(array_agg(o.seq), '{}')
FROM unnest($1::text[], $2::bigint[]) AS k(aggregate_id, seq)
JOIN outbox o ON o.part = (hashtextextended(k.aggregate_id, 0) & 15)::smallint AND o.seq = k.seq
