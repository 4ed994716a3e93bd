-- How much of the stream was published again so far, and after which mark. The commit does not wait for a standby: see
-- state_adopt.
UPDATE outbox_reconcile SET restored = greatest(restored, $2), expected = $3, touched_mark = least(touched_mark, $4)
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE id = ANY ($1::bigint[]) AND done_at IS NULL
