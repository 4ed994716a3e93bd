-- Records stream $1, one of those of the type $4, for the owner in relay_state. An adoption waits for this statement,
-- which therefore must not wait for a synchronous standby. A stream of another type stays that type's, unless it was
-- dropped and was not published to since, as far as the marks tell. Returns whether the caller is the owner; whether
-- the stream's gate was raised before (if another session records it at the same moment, it was not); whether there is
-- a standby to wait for: see mark_replicated; and the type that has the stream.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $3 AND r.epoch = $2 FOR SHARE OF r
), noted AS (
    INSERT INTO outbox_stream AS s (stream, adopted_epoch, base) SELECT $1, $2, $4 FROM owner
    ON CONFLICT (stream) DO UPDATE
    SET adopted_epoch = greatest(s.adopted_epoch, excluded.adopted_epoch), base = excluded.base
    WHERE CASE WHEN s.base = excluded.base THEN s.adopted_epoch < excluded.adopted_epoch
        ELSE s.dropped_at IS NOT NULL AND NOT EXISTS (
            SELECT FROM outbox_mark m WHERE m.at > s.dropped_at AND pg_catalog.jsonb_exists(m.entries, s.stream)) END
    RETURNING gated, base
)
SELECT EXISTS (SELECT FROM owner),
    coalesce((SELECT gated FROM noted), (SELECT gated FROM outbox_stream WHERE stream = $1), false),
    EXISTS (SELECT FROM noted) AND pg_catalog.current_setting('synchronous_standby_names') <> '',
    coalesce((SELECT base FROM noted), (SELECT base FROM outbox_stream WHERE stream = $1), $4)
