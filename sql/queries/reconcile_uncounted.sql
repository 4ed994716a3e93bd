-- The notes whose missing events are not reported yet, after the comparison of their streams. first_mark is the mark up
-- to which missing events were not restored. Events of a stream from before an operator dropped it are not missing.
SELECT r.id, r.stream, r.noticed_at, coalesce(r.after_entry, ''), greatest(r.since, s.dropped_at), r.missing,
    r.first_mark, r.refused
FROM outbox_reconcile r LEFT JOIN outbox_stream s ON s.stream = r.stream
WHERE NOT r.told AND NOT EXISTS (
    SELECT FROM outbox_reconcile p WHERE p.stream = r.stream AND p.done_at IS NULL)
ORDER BY r.id
