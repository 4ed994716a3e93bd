-- Committed without waiting for a synchronous standby: a standby that is gone must not keep a relay from taking over. A
-- failover may take the number back; the gates know the higher one and are overtaken. It may take transaction ids back, too:
-- a barrier of another timeline is an unknown one. $7 to $11: streams that may lack something, the last id of each, the time
-- by Redis' clock in ms, how long ago the last id was given in ms (NULL if that is not known), and how many events it lacks
-- (NULL if history has to be counted); $14 to $17: whether something may be lost, whether it is to be repaired, whether its
-- gate does not know what is in it, and whether this table does not know that it was published to. $12: the gates know that this database has gone back in time. $18: how many
-- streams of a type the new owner knows of. Nobody is active: who sweeps along waits until the leader says so.
WITH was AS MATERIALIZED (
    SELECT r.timeline FROM relay_state r WHERE r.name = $1
), now AS MATERIALIZED (
    -- The timeline that is written now: the control file still names the old one for a while after a promotion.
    SELECT s.system_identifier, ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer AS timeline
    FROM pg_control_system() s, pg_catalog.set_config('synchronous_commit', 'local', true)
), adopted AS (
    UPDATE relay_state r
    SET epoch = $3, nonce = $4, owner = $5, sink = nullif($6, ''), changed_at = clock_timestamp(), degraded = NULL, prefix = $13, active_mode = 'standby', shards_epoch = $3,
        slot_barrier = CASE WHEN r.slot_barrier IS NOT NULL AND r.timeline IS DISTINCT FROM now.timeline THEN 9223372036854775807 ELSE r.slot_barrier END,
        system_identifier = now.system_identifier, timeline = now.timeline
    FROM now
    WHERE r.name = $1 AND r.epoch = $2 AND r.shards = $18::smallint
    RETURNING r.timeline
), suspected AS (
    INSERT INTO outbox_loss (epoch, stream, after_entry, until_ms, since, events)
    SELECT $3, s.stream, s.after_entry, s.until_ms, clock_timestamp() - s.age::float8 * interval '1 ms' - interval '5 min', s.events
    FROM adopted, unnest($7::text[], $8::text[], $9::bigint[], $10::bigint[], $11::bigint[], $14::boolean[]) AS s(stream, after_entry, until_ms, age, events, lost)
    WHERE s.lost
), repairs AS (
    INSERT INTO outbox_repair (epoch, stream, after_entry, since, recall, back)
    SELECT $3, s.stream, s.after_entry, clock_timestamp() - s.age::float8 * interval '1 ms' - interval '5 min', s.recall, s.back
    FROM adopted, unnest($7::text[], $8::text[], $10::bigint[], $15::boolean[], $16::boolean[], $17::boolean[]) AS s(stream, after_entry, age, repair, recall, back)
    WHERE s.repair
), back AS (
    SELECT FROM adopted, was WHERE was.timeline <> adopted.timeline OR $12::boolean
), compared AS (
    INSERT INTO outbox_repair (epoch, stream, recall, back)
    SELECT $3, s.stream, true, true FROM back, outbox_stream s
), failed_over AS (
    INSERT INTO outbox_loss (stream, events)
    SELECT '', -1 FROM back
    WHERE NOT EXISTS (SELECT FROM outbox_loss WHERE stream = '' AND noticed_at > clock_timestamp() - interval '1 min') -- said
)
SELECT count(*) FROM adopted
