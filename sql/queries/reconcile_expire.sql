-- Deletes reports that are older than history ($1): events that it does not contain any more cannot be restored.
WITH old AS (
    DELETE FROM outbox_phantom WHERE noticed_at < clock_timestamp() - greatest($1::interval, interval '30 days')
)
DELETE FROM outbox_reconcile
WHERE told AND done_at < clock_timestamp() - greatest($1::interval, interval '72 hours')
