-- Writes the new owner if the epoch is still $2. No mode is active until the leader sets one.
--
-- The commit does not wait for a synchronous standby: an unreachable one must not prevent a takeover. A failover may
-- take the epoch back; the gates know the higher one and are overtaken. It may take transaction ids back as well, so a
-- barrier of another timeline counts as unknown.
--
-- $7 to $10 are streams that may lack something: names, the last id of each, how long ago that was given in ms (NULL if
-- unknown), and how many events it lacks (NULL if history must be counted). $12 to $15: whether something may be lost,
-- whether it must be repaired, whether its gate does not know what it contains, and whether this table does not know
-- that it was published to. $11: the gates know that this database has gone back in time.
WITH was AS MATERIALIZED (
    SELECT r.timeline FROM relay_state r WHERE r.name = $1
), now AS MATERIALIZED (
    -- The timeline that is written now: after a promotion the control file still has the old one for a while.
    SELECT s.system_identifier, d.oid,
        ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()),
            8))::bit(32)::integer AS timeline
    FROM pg_control_system() s, pg_catalog.pg_database d,
        pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE d.datname = pg_catalog.current_database()
), adopted AS (
    UPDATE relay_state r
    SET epoch = $3, nonce = $4, owner = $5, sink = nullif($6, ''), changed_at = clock_timestamp(), degraded = NULL,
        active_mode = 'standby', system_identifier = now.system_identifier, database_oid = now.oid,
        timeline = now.timeline,
        slot_barrier = CASE WHEN r.slot_barrier IS NOT NULL AND r.timeline IS DISTINCT FROM now.timeline
            THEN 9223372036854775807 ELSE r.slot_barrier END
    FROM now
    WHERE r.name = $1 AND r.epoch = $2
    RETURNING r.timeline
), suspected AS (
    INSERT INTO outbox_loss (epoch, stream, after_entry, since, events)
    SELECT $3, s.stream, s.after_entry, clock_timestamp() - s.age::float8 * interval '1 ms' - interval '5 min', s.events
    FROM adopted, unnest($7::text[], $8::text[], $9::bigint[], $10::bigint[], $12::boolean[])
        AS s(stream, after_entry, age, events, lost)
    WHERE s.lost
), repairs AS (
    INSERT INTO outbox_repair (epoch, stream, after_entry, since, recall, back)
    SELECT $3, s.stream, s.after_entry, clock_timestamp() - s.age::float8 * interval '1 ms' - interval '5 min',
        s.recall,
        s.back
    FROM adopted, unnest($7::text[], $8::text[], $9::bigint[], $13::boolean[], $14::boolean[], $15::boolean[])
        AS s(stream, after_entry, age, repair, recall, back)
    WHERE s.repair
), back AS (
    SELECT FROM adopted, was WHERE was.timeline <> adopted.timeline OR $11::boolean
), compared AS (
    INSERT INTO outbox_repair (epoch, stream, recall, back)
    SELECT $3, s.stream, true, true FROM back, outbox_stream s
), failed_over AS (
    INSERT INTO outbox_loss (stream, events)
    SELECT '', -1 FROM back
    WHERE NOT EXISTS (SELECT FROM outbox_loss WHERE stream = '' AND noticed_at > clock_timestamp() - interval '1 min')
)
SELECT count(*) FROM adopted
