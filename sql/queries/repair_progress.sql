-- What is in the stream again so far, and behind which mark; as in state_adopt, without waiting for a standby.
UPDATE outbox_repair SET restored = greatest(restored, $2), expected = $3, touched_mark = least(touched_mark, $4)
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE id = ANY ($1::bigint[]) AND done_at IS NULL
