-- The streams to compare, in the order of their oldest notes: the ids of the notes, whether to recall, whether Postgres
-- has gone back, whether a repair has begun to publish and how much it has published, the consumer groups if the stream
-- has lost something, the newest mark, the mark after which settled events may be missing (NULL if none may be), and a
-- time that no missing event was published before (NULL if that is not known), except those that were created earlier.
-- $1: nothing settled longer before the note is missing. $2: whether to restore. Events of a stream from before an
-- operator dropped it are not restored.
--
-- Missing events are those of the first mark with a newer entry than the stream has. Events that an earlier comparison
-- has restored have newer entries than their marks. If these are lost, the next one begins at the same mark, but not
-- before events that were settled twice $1 before the loss was noticed. Without that limit each loss would restore what
-- all losses before it had restored. One read of the marks serves all notes: no mark is written until they are done.
--
-- An event that a mark settles was published after the mark before it was written, unless it was delayed then.
WITH note AS MATERIALIZED (
    SELECT r.*, s.groups, pg_catalog.split_part(nullif(r.after_entry, ''), '-', 1)::numeric AS ms,
        pg_catalog.split_part(nullif(r.after_entry, ''), '-', 2)::numeric AS i,
        greatest(coalesce(r.since, '-infinity'), s.dropped_at, r.noticed_at - $1::interval) AS bound
    FROM outbox_reconcile r LEFT JOIN outbox_stream s ON s.stream = r.stream WHERE r.done_at IS NULL
), lost AS (
    SELECT n.id, pg_catalog.min(m.id) - 1 AS mark
    FROM outbox_mark m CROSS JOIN LATERAL pg_catalog.jsonb_each_text(m.entries) e JOIN note n ON n.stream = e.key
    WHERE $2::boolean AND m.settled IS NOT NULL AND m.at >= n.bound AND m.id > coalesce((
        SELECT o.id FROM outbox_mark o WHERE o.at < (SELECT pg_catalog.min(bound) FROM note)
        ORDER BY o.id DESC LIMIT 1), 0)
      AND n.after_entry IS NOT NULL AND (n.ms IS NULL OR (pg_catalog.split_part(e.value, '-', 1)::numeric,
          pg_catalog.split_part(e.value, '-', 2)::numeric) > (n.ms, n.i))
    GROUP BY n.id
    UNION ALL
    SELECT n.id, greatest(pg_catalog.min(r.touched_mark), (
        SELECT pg_catalog.max(m.id) FROM outbox_mark m WHERE m.at < n.noticed_at - $1::interval - $1::interval))
    FROM outbox_reconcile r JOIN note n ON n.stream = r.stream
    WHERE $2 AND r.touched_mark IS NOT NULL AND r.done_at >= n.bound AND r.last_entry <> ''
      AND n.after_entry IS NOT NULL AND (n.ms IS NULL OR (pg_catalog.split_part(r.last_entry, '-', 1)::numeric,
          pg_catalog.split_part(r.last_entry, '-', 2)::numeric) > (n.ms, n.i))
    GROUP BY n.id, n.noticed_at
), job AS (
    SELECT n.stream, pg_catalog.array_agg(DISTINCT n.id) AS ids, pg_catalog.bool_or(n.recall) AS recall,
        pg_catalog.bool_or(n.back) AS back, pg_catalog.bool_or(n.touched_mark IS NOT NULL) AS begun,
        coalesce(pg_catalog.max(n.restored), 0) AS restored, pg_catalog.min(n.ms) AS ms, pg_catalog.min(l.mark) AS mark,
        CASE WHEN pg_catalog.bool_or(n.after_entry = '' OR l.mark IS NOT NULL) THEN n.groups END AS groups
    FROM note n LEFT JOIN lost l ON l.id = n.id GROUP BY n.stream, n.groups
)
SELECT j.ids, j.stream, j.recall, j.back, j.begun, j.restored, coalesce(j.groups, '{}'),
    (SELECT greatest(pg_catalog.max(id), 1::bigint) FROM outbox_mark WHERE settled IS NOT NULL), j.mark,
    (SELECT least(m.at, pg_catalog.to_timestamp(least(j.ms, 4e12::numeric)::float8 / 1000::float8)) FROM outbox_mark m
     WHERE m.id <= j.mark AND m.settled IS NOT NULL ORDER BY m.id DESC LIMIT 1)
FROM job j ORDER BY j.ids[1]
