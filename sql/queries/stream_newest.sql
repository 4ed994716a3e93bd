-- By stream, the last entry in one of the newest marks, or of a repair, which republishes events with newer entries
-- than those in their marks. Entries from before the stream was last found incomplete, or was dropped, do not count.
WITH stream AS MATERIALIZED (
    SELECT s.stream, greatest(coalesce(s.dropped_at, '-infinity'), (
        SELECT pg_catalog.max(r.noticed_at) FROM outbox_reconcile r WHERE r.stream = s.stream)) AS since
    FROM outbox_stream s
), noted AS (
    SELECT e.key AS stream, e.value AS entry, m.at
    FROM (SELECT at, entries FROM outbox_mark WHERE entries IS NOT NULL ORDER BY id DESC LIMIT 20000) m
    CROSS JOIN LATERAL pg_catalog.jsonb_each_text(m.entries) e
    UNION ALL
    SELECT r.stream, r.last_entry, r.done_at FROM outbox_reconcile r WHERE r.last_entry <> ''
)
SELECT DISTINCT ON (s.stream) s.stream, n.entry FROM stream s JOIN noted n ON n.stream = s.stream AND n.at > s.since
ORDER BY s.stream, pg_catalog.split_part(n.entry, '-', 1)::numeric DESC,
    pg_catalog.split_part(n.entry, '-', 2)::numeric DESC
