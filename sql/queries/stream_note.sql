-- Notes stream $1, one of those of the type $4, for the owner that relay_state names, and for nobody else: an instance that knows
-- another layout would publish to a stream whose gate an adoption has not raised. An adoption waits for a note under way, so that
-- must not wait for a synchronous standby. A stream of another type stays that one's, unless it was dropped and was not published to
-- since, as far as the marks tell. Returns whether the owner is that one; whether the stream's gate was raised before (somebody may
-- note it at the same moment: then it was not); whether there is a standby to wait for: see mark_replicated; and whose it is.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $3 AND r.epoch = $2 FOR SHARE OF r
), noted AS (
    INSERT INTO outbox_stream AS s (stream, adopted_epoch, base) SELECT $1, $2, $4 FROM owner
    ON CONFLICT (stream) DO UPDATE SET adopted_epoch = greatest(s.adopted_epoch, excluded.adopted_epoch), base = excluded.base
    WHERE CASE WHEN coalesce(s.base, s.stream) = excluded.base THEN s.adopted_epoch < excluded.adopted_epoch
        ELSE s.dropped_at IS NOT NULL
            AND NOT EXISTS (SELECT FROM outbox_mark m WHERE m.at > s.dropped_at AND pg_catalog.jsonb_exists(m.entries, s.stream)) END
    RETURNING gated, base
)
SELECT EXISTS (SELECT FROM owner), coalesce((SELECT gated FROM noted), (SELECT gated FROM outbox_stream WHERE stream = $1), false),
    EXISTS (SELECT FROM noted) AND pg_catalog.current_setting('synchronous_standby_names') <> '',
    coalesce((SELECT base FROM noted), (SELECT coalesce(base, stream) FROM outbox_stream WHERE stream = $1), $4)
