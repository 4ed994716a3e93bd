-- Writes the new owner if the epoch is still $2. No mode is active until the leader sets one.
--
-- The commit does not wait for a synchronous standby: an unreachable one must not prevent a takeover. A failover may
-- take the epoch back; the gates know the higher one and are overtaken. It may take transaction ids back as well, so a
-- barrier of another timeline counts as unknown.
--
-- $7: the streams that may lack something, as an array of JSON. $8: the gates know that this database has gone back in
-- time.
WITH was AS MATERIALIZED (
    SELECT r.timeline FROM relay_state r WHERE r.name = $1
), now AS MATERIALIZED (
    -- Not the timeline of the control file: after a promotion that still has the old one for a while.
    SELECT p.*, outbox_timeline() AS timeline
    FROM outbox_place p, pg_catalog.set_config('synchronous_commit', 'local', true)
), brought AS MATERIALIZED (
    -- The transactions that bring rows of another database: see outbox_copying. Only the first adoption waits.
    SELECT pg_catalog.count(pg_catalog.pg_advisory_xact_lock(outbox_copy_key())) FROM relay_state r
    WHERE outbox_copied(r) IS NOT FALSE
), adopted AS (
    UPDATE relay_state r
    SET epoch = $3, nonce = $4, owner = $5, sink = nullif($6, ''), changed_at = clock_timestamp(), degraded = NULL,
        active_mode = 'standby', system_identifier = now.system_identifier, database_oid = now.database_oid,
        first_migration = now.first_migration, timeline = now.timeline,
        slot_barrier = CASE WHEN r.slot_barrier IS NOT NULL AND r.timeline IS DISTINCT FROM now.timeline
            THEN 9223372036854775807 ELSE r.slot_barrier END
    FROM now, brought
    WHERE r.name = $1 AND r.epoch = $2
    RETURNING r.timeline
), noted AS (
    -- A note that waits for its repair covers a later one of the same: a stream may be adopted, and not be repaired,
    -- again and again.
    INSERT INTO outbox_reconcile (stream, after_entry, since, recall, back, missing, told)
    SELECT s.stream, s.after_entry, t.since, s.recall, s.back, s.missing, s.told
    FROM adopted, pg_catalog.jsonb_to_recordset($7::jsonb) AS s(
        stream text, after_entry text, age bigint, recall boolean, back boolean, missing bigint, told boolean)
    CROSS JOIN LATERAL (
        SELECT clock_timestamp() - s.age::float8 * interval '1 ms' - interval '5 min' AS since) t
    WHERE NOT EXISTS (
        SELECT FROM outbox_reconcile r
        WHERE r.done_at IS NULL AND r.stream = s.stream AND r.after_entry IS NOT DISTINCT FROM s.after_entry
          AND (r.since IS NULL OR r.since < t.since + interval '1 s') AND r.recall >= s.recall AND r.back >= s.back
          AND r.missing IS NOT DISTINCT FROM s.missing)
), back AS (
    -- A negative timeline may only mean that the server was restarted: see outbox_timeline.
    SELECT $8 OR was.timeline = 0 OR least(was.timeline, adopted.timeline) > 0 AS noticed
    FROM adopted, was WHERE was.timeline <> adopted.timeline OR $8::boolean
), compared AS (
    INSERT INTO outbox_reconcile (stream, recall, back, told)
    SELECT s.stream, true, noticed, true FROM back, outbox_stream s
), failed_over AS (
    INSERT INTO outbox_reconcile (stream, recall, back, done_at, missing)
    SELECT '', false, true, clock_timestamp(), -1 FROM back
    WHERE noticed AND NOT EXISTS (
        SELECT FROM outbox_reconcile WHERE stream = '' AND noticed_at > clock_timestamp() - interval '1 min')
)
SELECT count(*) FROM adopted
