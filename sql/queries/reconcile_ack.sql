-- Ends the notice that Postgres has gone back in time, even before the leader has reported it.
UPDATE outbox_reconcile SET replayed_at = clock_timestamp() WHERE stream = '' AND replayed_at IS NULL
