-- Returns this database's identity towards Redis; zeros if it never had a relay.
UPDATE outbox_stream SET dropped_at = clock_timestamp(), groups = NULL WHERE stream = $1
RETURNING coalesce((SELECT source FROM relay_state), '00000000-0000-0000-0000-000000000000')
