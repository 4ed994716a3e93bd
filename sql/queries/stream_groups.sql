-- Notes the consumer groups of streams ($1) where they are others than before, for the epoch ($3) that has seen them.
-- The commit does not wait for a standby: see state_adopt.
UPDATE outbox_stream s SET groups = n.groups
FROM (
    SELECT e.key AS stream, ARRAY(SELECT pg_catalog.jsonb_array_elements_text(e.value)) AS groups
    FROM pg_catalog.jsonb_each($1::jsonb) e
) n, relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE s.stream = n.stream AND s.groups::text <> n.groups::text AND r.name = $2 AND r.epoch = $3
