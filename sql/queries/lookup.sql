-- Answers with the places in the arrays of the rows that exist. The snapshot and the look-up are one statement, so that "no
-- row" can be told from "not visible yet".
SELECT pg_current_snapshot()::text, coalesce(pg_catalog.array_agg(k.n), '{}')
FROM unnest($1::text[], $2::bigint[], $3::uuid[]) WITH ORDINALITY AS k(aggregate_id, seq, id, n)
JOIN outbox o ON o.part = (pg_catalog.hashtextextended(k.aggregate_id, 0) & 15::bigint)::smallint AND o.seq = k.seq AND o.id = k.id
