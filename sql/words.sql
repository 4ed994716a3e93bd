-- Functions and views of the statements: each condition is written once. Postgres inlines them, so they add no cost.
-- Each migration of the outbox replaces them.

-- A time that every reader can represent: years 1 to 9999. The stream has the same limits.
CREATE OR REPLACE FUNCTION outbox_time(t timestamptz) RETURNS timestamptz LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(greatest(t, pg_catalog.to_timestamp(-62135596800::float8)), pg_catalog.to_timestamp(253402300799::float8));

-- Whether a mark settles a row.
CREATE OR REPLACE FUNCTION outbox_holds(settled pg_snapshot, hi bigint, pass pg_snapshot, cursor bigint, xid xid8,
    seq bigint)
RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (seq <= hi AND pg_catalog.pg_visible_in_snapshot(xid, settled)
    OR seq <= cursor AND pg_catalog.pg_visible_in_snapshot(xid, pass)) IS TRUE;

-- The name of the stream of an aggregate's events.
CREATE OR REPLACE FUNCTION outbox_stream_name(prefix text, aggregate_type text, part smallint, shards smallint)
RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN prefix || aggregate_type
    || CASE WHEN shards > 1::smallint THEN '.'::text || (part % shards)::text ELSE ''::text END;

-- The timeline that is written. A server that refuses to name it, as managed ones may, has a negative number, which
-- every start of the server changes.
CREATE OR REPLACE FUNCTION outbox_timeline() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RETURN ('x'::text || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
    RETURN -1 - pg_catalog.mod(
        (extract(epoch FROM pg_postmaster_start_time()) * 1000000::numeric)::bigint, 2147483647::bigint)::integer;
END $$;

-- Whether an owner is still the one that adopted, on a server that was not promoted since.
CREATE OR REPLACE FUNCTION outbox_owned(r relay_state, epoch bigint, nonce bytea) RETURNS boolean LANGUAGE sql
RETURN r.epoch = $2 AND r.nonce = $3 AND r.timeline = outbox_timeline();

-- The system identifier; NULL if the server refuses it. It is the same for every role, whatever its search path.
CREATE OR REPLACE FUNCTION outbox_system() RETURNS bigint LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
BEGIN
    RETURN (SELECT s.system_identifier FROM pg_catalog.pg_control_system() s);
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR object_not_in_prerequisite_state THEN
    RETURN NULL;
END $$;

-- Where this database is: the server, the database on it, and the row that the first migration has written. That row is
-- not replicated, and a restored one was written by another transaction of another table.
CREATE OR REPLACE VIEW outbox_place AS
SELECT outbox_system() AS system_identifier, d.oid AS database_oid, pg_catalog.hashtextextended(pg_catalog.concat_ws(
    ' ', m.tableoid, m.xmin, extract(epoch FROM m.applied_at)), 0) AS first_migration
FROM pg_database d, posthaste_migrations m
WHERE d.datname = current_database() AND m.line = 'outbox' AND m.version = 1;

-- Whether this database is a copy of the one that last led. NULL: none has led.
CREATE OR REPLACE FUNCTION outbox_copied(r relay_state) RETURNS boolean LANGUAGE sql STABLE
RETURN (SELECT r.database_oid <> p.database_oid OR coalesce(
    r.system_identifier <> p.system_identifier, r.first_migration <> p.first_migration) FROM outbox_place p);

-- The lock of the transactions that bring rows of another database.
CREATE OR REPLACE FUNCTION outbox_copy_key() RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN pg_catalog.hashtextextended('posthaste copy ' || 'outbox_mark'::regclass::oid::text, 0);

-- Whether rows of another database may bring their transactions: no relay has led this database, or its marks are
-- replicated, too. Elsewhere a row is of the transaction that writes it. If it were of another one, marks might settle
-- it before it is published, or never. A constraint that is not valid comes after the rows in a dump. The first
-- adoption waits for the lock, so that it has the rows of every transaction that was allowed to bring some. Each
-- statement must see whether there was an adoption since.
CREATE OR REPLACE FUNCTION outbox_copying() RETURNS boolean LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    SELECT pg_catalog.pg_advisory_xact_lock_shared(outbox_copy_key());
    SELECT EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = 'outbox_mark'::regclass::oid)
        OR pg_catalog.current_setting('transaction_isolation'::text) = 'read committed'::text
        AND NOT EXISTS (SELECT FROM relay_state r WHERE outbox_copied(r) IS FALSE);
END;
ALTER DOMAIN outbox_xid DROP CONSTRAINT IF EXISTS "the server sets it: leave xid and seq out";
ALTER DOMAIN outbox_xid ADD CONSTRAINT "the server sets it: leave xid and seq out" CHECK (
    VALUE = pg_current_xact_id()
    OR pg_catalog.current_setting('posthaste.copy'::text, true) IS NOT DISTINCT FROM 'on'::text
    OR outbox_copying()) NOT VALID;

-- The session that holds the leader's lock: see lock_key.
CREATE OR REPLACE VIEW outbox_leader AS
SELECT l.pid FROM pg_locks l
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.mode = 'ExclusiveLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = pg_catalog.hashtextextended(
      'posthaste leader ' || 'outbox'::regclass::oid::text, 0);

-- The highest number that a row may have by now.
CREATE OR REPLACE VIEW outbox_high AS
SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1::bigint END AS high FROM outbox_seq_seq s;

-- How streams are named now.
CREATE OR REPLACE VIEW outbox_layout AS
SELECT m.prefix, m.shards FROM outbox_mark m WHERE m.settled IS NOT NULL ORDER BY m.id DESC LIMIT 1;

-- The rows with their parts, and about how many bytes they are as text, judged by what is stored.
CREATE OR REPLACE VIEW outbox_rows AS
SELECT outbox_part(o.aggregate_id) AS part, o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload,
    o.headers, o.created_at, o.xid::xid8 AS xid,
    pg_catalog.pg_column_size(o.payload)
        * CASE WHEN pg_catalog.pg_column_compression(o.payload) IS NULL THEN 1 ELSE 4 END
        + coalesce(pg_catalog.pg_column_size(o.headers), 0) + pg_catalog.pg_column_size(o.aggregate_id) AS bytes
FROM outbox o;

-- Rows that are not dead. OFFSET 0 keeps the dead events from being read all at once.
CREATE OR REPLACE VIEW outbox_live AS
SELECT o.* FROM outbox_rows o
WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0);

-- The newest mark of a part up to a mark's id. Each range in an order that only the index of parts has.
CREATE OR REPLACE FUNCTION outbox_mark_until(of_part smallint, until bigint)
RETURNS TABLE (id bigint, settled pg_snapshot, hi bigint, pass pg_snapshot, pass_hi bigint, cursor bigint, prefix text,
    shards smallint) LANGUAGE sql STABLE ROWS 1
BEGIN ATOMIC
    SELECT n.id, n.settled, n.hi, n.pass, n.pass_hi, n.cursor, n.prefix, n.shards FROM (
        (SELECT * FROM outbox_mark m WHERE m.part >= of_part AND (m.part, m.id) <= (of_part, until)
            AND m.settled IS NOT NULL ORDER BY m.part DESC, m.id DESC LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark m WHERE m.part >= (-1)::smallint AND (m.part, m.id) <= ((-1)::smallint, until)
            AND m.settled IS NOT NULL ORDER BY m.part DESC, m.id DESC LIMIT 1)
    ) n ORDER BY n.id DESC LIMIT 1;
END;

-- The newest mark of each part, and the transactions that were running when its snapshot was taken.
CREATE OR REPLACE VIEW outbox_settled AS
SELECT p.part::smallint AS part, m.id AS mark, m.settled, m.hi, m.pass, m.pass_hi, m.cursor,
    ARRAY(SELECT pg_catalog.pg_snapshot_xip(m.settled)) AS running, m.prefix, m.shards
FROM pg_catalog.generate_series(0, 15) AS p(part)
CROSS JOIN LATERAL outbox_mark_until(p.part::smallint, 9223372036854775807) m;

-- The first mark that settles a row.
CREATE OR REPLACE FUNCTION outbox_settling(of_part smallint, of_xid xid8, of_seq bigint)
RETURNS TABLE (id bigint, at timestamptz, mode text, entries jsonb, prefix text, shards smallint)
LANGUAGE sql STABLE ROWS 1
BEGIN ATOMIC
    SELECT k.id, k.at, k.mode, k.entries, k.prefix, k.shards FROM (
        (SELECT * FROM outbox_mark m WHERE m.part = of_part AND m.settled IS NOT NULL AND m.hi >= of_seq
            AND pg_catalog.pg_visible_in_snapshot(of_xid, m.settled) ORDER BY m.hi, m.id LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark m WHERE m.part = (-1)::smallint AND m.settled IS NOT NULL AND m.hi >= of_seq
            AND pg_catalog.pg_visible_in_snapshot(of_xid, m.settled) ORDER BY m.hi, m.id LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark m WHERE m.part = of_part AND m.cursor >= of_seq
            AND pg_catalog.pg_visible_in_snapshot(of_xid, m.pass) ORDER BY m.cursor, m.id LIMIT 1)
    ) k ORDER BY k.id LIMIT 1;
END;

-- Events that are not settled.
CREATE OR REPLACE VIEW outbox_backlog AS
SELECT o.part, o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers, o.created_at, o.bytes,
    o.xid, outbox_stream_name(m.prefix, o.aggregate_type, o.part, m.shards) AS stream
FROM outbox_settled m
CROSS JOIN LATERAL (
    SELECT * FROM outbox_live r WHERE r.part = m.part AND r.xid = ANY (m.running)
    UNION ALL
    SELECT * FROM outbox_live r WHERE r.part = m.part AND r.xid >= pg_catalog.pg_snapshot_xmax(m.settled)
) o
WHERE m.pass IS NULL OR o.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.pass);

-- Events that were delivered, with the time when their mark was written.
CREATE OR REPLACE VIEW outbox_history AS
SELECT o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
    CASE WHEN pg_catalog.isfinite(o.created_at) THEN outbox_time(o.created_at) ELSE m.at END AS created_at,
    m.at AS published_at,
    outbox_stream_name(m.prefix, o.aggregate_type, o.part, m.shards) AS stream, m.mode
FROM outbox_live o CROSS JOIN LATERAL outbox_settling(o.part, o.xid, o.seq) m;

-- The text, if the client's encoding can represent it; otherwise the start of it in ASCII, which fits every column.
CREATE OR REPLACE FUNCTION outbox_readable(t text) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
    PERFORM pg_catalog.convert_to(t, pg_catalog.pg_client_encoding());
    RETURN t;
EXCEPTION WHEN data_exception THEN
    RETURN pg_catalog.left(pg_catalog.encode(
        pg_catalog.convert_to(t, pg_catalog.getdatabaseencoding()), 'escape'::text), 255);
END $$;

-- For writers in any language: inserts an event in their transaction, with their rights, and returns its id.
CREATE OR REPLACE FUNCTION outbox_publish(aggregate_type text, aggregate_id text, event_type text, payload jsonb,
    headers jsonb DEFAULT NULL)
RETURNS uuid LANGUAGE sql
BEGIN ATOMIC
    -- RETURNING would require the right to read.
    WITH new AS MATERIALIZED (SELECT gen_random_uuid() AS id), inserted AS (
        INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
        SELECT id, $1, $2, $3, $4, $5 FROM new
    )
    SELECT id FROM new;
END;

-- Inserts a dead event again, in a new row, and deletes its row before. Operators may call it; they may not delete rows
-- otherwise. The row is deleted first: ids are unique.
CREATE OR REPLACE FUNCTION outbox_retry(event uuid) RETURNS void LANGUAGE sql SECURITY DEFINER
BEGIN ATOMIC
    WITH dead AS MATERIALIZED (
        SELECT * FROM outbox_dead d WHERE d.id = event AND d.retry_seq IS NULL AND d.dropped_at IS NULL
            AND d.payload IS NOT NULL FOR UPDATE
    ), gone AS (
        DELETE FROM outbox o USING dead d WHERE o.id = d.id AND o.seq = d.row_seq RETURNING o.id
    ), again AS (
        INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
        SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, created_at
        FROM dead WHERE (SELECT pg_catalog.count(*) FROM gone) >= 0
        RETURNING id, seq
    )
    UPDATE outbox_dead d SET retry_seq = again.seq FROM again WHERE d.id = again.id;
END;
REVOKE EXECUTE ON FUNCTION outbox_retry FROM PUBLIC;

-- The functions of a bridge's trigger (package bridge), which runs with the search path pg_catalog. Place is a column
-- and its table, row the id of the row.
CREATE OR REPLACE FUNCTION outbox_bridge_refuse(want text, place text, of_row text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% must be %', place, want USING ERRCODE = 'data_exception',
        DETAIL = pg_catalog.format('It is not in the row with the id "%s".', of_row);
END $$;
CREATE OR REPLACE FUNCTION outbox_bridge_json(value text, place text, of_row text) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN value::jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RAISE EXCEPTION '% must be JSON: %', place, SQLERRM USING ERRCODE = 'data_exception',
        DETAIL = pg_catalog.format('It is not in the row with the id "%s".', of_row);
END $$;
-- The name-based uuid (version 3) of a name in the namespace of URLs.
CREATE OR REPLACE FUNCTION outbox_bridge_id(name text) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
BEGIN ATOMIC
    SELECT pg_catalog.concat(pg_catalog.left(h, 12), '3', pg_catalog.substr(h, 14, 3), pg_catalog.translate(
        pg_catalog.substr(h, 17, 1), '0123456789abcdef', '89ab89ab89ab89ab'), pg_catalog.substr(h, 18))::uuid
    FROM pg_catalog.md5('\x6ba7b8119dad11d180b400c04fd430c8'::bytea || pg_catalog.convert_to(name, 'UTF8')) AS x(h);
END;
