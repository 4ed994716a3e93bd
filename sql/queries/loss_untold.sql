-- Suspicions to count. Streams that are still to be repaired are counted afterwards. Returns up to which mark nothing
-- was restored, and how many restored events were refused. Events of a stream from before an operator dropped it are
-- not lost.
SELECT l.id, l.stream, l.after_entry, greatest(l.since, s.dropped_at), l.events, l.noticed_at, r.first_mark,
    coalesce(r.refused, 0)
FROM outbox_loss l LEFT JOIN outbox_stream s ON s.stream = l.stream
LEFT JOIN outbox_repair r ON r.stream = l.stream AND r.epoch = l.epoch AND r.after_entry IS NOT NULL
WHERE NOT told AND NOT EXISTS (SELECT FROM outbox_repair p WHERE p.stream = l.stream AND p.done_at IS NULL)
ORDER BY l.id
