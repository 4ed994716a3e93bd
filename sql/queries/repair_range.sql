-- For notes of streams ($1), the entry after which something is lost ($2), since when ($3) and when that was noticed
-- ($4): the marks that may have settled what is lost, after the first, up to the second; see loss_range.
--
-- Events that an earlier repair has republished have newer entries than their marks. If these are lost, the next repair
-- begins at the same mark, but not before events that were settled twice $5 before the loss was noticed. Without that
-- limit each loss would restore what all losses before it had restored. Everything else is restored if it was settled
-- at most $5 before. One read of the marks serves all notes: no mark is written until the streams are repaired.
WITH note AS MATERIALIZED (
    SELECT n.*, pg_catalog.split_part(nullif(n.after_entry, ''), '-', 1)::numeric AS ms,
        pg_catalog.split_part(nullif(n.after_entry, ''), '-', 2)::numeric AS i,
        greatest(coalesce(n.since, '-infinity'), n.noticed - $5::interval) AS bound
    FROM unnest($1::text[], $2::text[], $3::timestamptz[], $4::timestamptz[]) WITH ORDINALITY
        AS n(stream, after_entry, since, noticed, n)
), lost AS (
    SELECT n.n, pg_catalog.min(m.id) - 1 AS mark
    FROM outbox_mark m CROSS JOIN LATERAL pg_catalog.jsonb_each_text(m.entries) e JOIN note n ON n.stream = e.key
    WHERE m.settled IS NOT NULL AND m.at >= n.bound AND m.id > coalesce((
        SELECT o.id FROM outbox_mark o WHERE o.at < (SELECT pg_catalog.min(bound) FROM note)
        ORDER BY o.id DESC LIMIT 1), 0)
      AND (n.ms IS NULL OR (pg_catalog.split_part(e.value, '-', 1)::numeric,
          pg_catalog.split_part(e.value, '-', 2)::numeric) > (n.ms, n.i))
    GROUP BY n.n
), again AS (
    SELECT n.n, greatest(pg_catalog.min(r.touched_mark), (
        SELECT pg_catalog.max(m.id) FROM outbox_mark m WHERE m.at < n.noticed - $5::interval - $5::interval)) AS mark
    FROM outbox_repair r JOIN note n ON n.stream = r.stream
    WHERE r.touched_mark IS NOT NULL AND r.done_at >= n.bound AND r.last_entry <> ''
      AND (n.ms IS NULL OR (pg_catalog.split_part(r.last_entry, '-', 1)::numeric,
          pg_catalog.split_part(r.last_entry, '-', 2)::numeric) > (n.ms, n.i))
    GROUP BY n.n, n.noticed
)
SELECT n.n, least(l.mark, a.mark), (SELECT pg_catalog.max(m.id) FROM outbox_mark m WHERE m.settled IS NOT NULL)
FROM note n LEFT JOIN lost l ON l.n = n.n LEFT JOIN again a ON a.n = n.n
WHERE l.mark IS NOT NULL OR a.mark IS NOT NULL
