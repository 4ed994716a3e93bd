-- The position is read after the rows (materialized first), so that it is behind the commit of each of them.
WITH first AS MATERIALIZED (
    SELECT p.part, (SELECT o.seq FROM outbox o WHERE o.part = p.part ORDER BY o.seq LIMIT 1) AS seq FROM outbox_part p
)
SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text, f.parts, f.seqs
FROM (SELECT coalesce(pg_catalog.array_agg(part), '{}') AS parts, coalesce(pg_catalog.array_agg(seq), '{}') AS seqs FROM first WHERE seq IS NOT NULL) f
