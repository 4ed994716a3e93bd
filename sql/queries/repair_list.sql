-- Repairs to do, oldest first. Events of a stream from before an operator dropped it are not restored.
SELECT r.id, r.stream, r.noticed_at, r.after_entry, greatest(r.since, s.dropped_at), r.recall, r.back,
    coalesce(s.groups, '{}')
FROM outbox_repair r LEFT JOIN outbox_stream s ON s.stream = r.stream
WHERE r.done_at IS NULL ORDER BY r.id
