-- The part of an aggregate's events. A worker that owns the part keeps their order.
CREATE FUNCTION outbox_part(aggregate_id text) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (pg_catalog.hashtext(aggregate_id) & 15)::smallint;

-- The limits of an event. outbox_owed checks them: Postgres parses a CHECK of a table for each statement, those of
-- domains and the expressions of an index once in a session. Drivers do not know domains: no column that they write has
-- one. Braces would put a stream and its gate into two slots of Redis Cluster.
CREATE DOMAIN outbox_xid AS xid8; -- see outbox_copying
CREATE DOMAIN outbox_aggregate_type AS text CONSTRAINT "1 to 64 of A-Z a-z 0-9 _ . : -" CHECK (
    pg_catalog.octet_length(VALUE) <= 64 AND VALUE COLLATE "C" ~ '^[A-Za-z0-9_.:-]+$');
CREATE DOMAIN outbox_aggregate_id AS text CONSTRAINT "at most 1024 bytes"
    CHECK (pg_catalog.octet_length(VALUE) <= 1024);
-- 2 kB of jsonb can be 1 GB as text, and one such row would stop every reader. 700 bytes are 8 MiB as text at most, so
-- the text of few payloads is made. #> expands what is stored compressed.
CREATE DOMAIN outbox_payload AS jsonb CONSTRAINT "at most 8388608 bytes as text" CHECK (
    pg_catalog.pg_column_size(VALUE #> '{}'::text[]) <= 700 OR pg_catalog.octet_length(VALUE::text) <= 8388608);
CREATE DOMAIN outbox_headers AS jsonb CONSTRAINT "at most 65536 bytes as text" CHECK (
    pg_catalog.octet_length(VALUE::text) <= 65536);

-- outbox is a log of events. A row stays when its event is published: it is its own history. Any service may insert
-- (id, aggregate_type, aggregate_id, event_type, payload[, headers]) in its own transaction.
CREATE TABLE outbox (
    id             uuid         PRIMARY KEY DEFAULT gen_random_uuid(),
    -- CACHE must stay 1: a cached sequence would give a later insert of the same aggregate a smaller number.
    seq            bigint       NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
    -- The transaction that wrote the row. Marks decide by it whether the row is settled.
    xid            outbox_xid   NOT NULL DEFAULT pg_current_xact_id(),
    created_at     timestamptz  NOT NULL DEFAULT clock_timestamp(),
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    event_type     varchar(255) NOT NULL,
    payload        jsonb        NOT NULL,
    headers        jsonb
) WITH (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 50000, autovacuum_vacuum_cost_delay = 0,
    -- Truncating the end of the table takes an exclusive lock that inserts would wait for.
    vacuum_truncate = false
);
CREATE UNIQUE INDEX outbox_log ON outbox (outbox_part(aggregate_id), seq);
-- Unsettled rows are found by transaction: numbers do not say when rows became visible. The last column checks limits.
CREATE INDEX outbox_owed ON outbox (outbox_part(aggregate_id), xid, pg_catalog.num_nulls(
    aggregate_type::outbox_aggregate_type, aggregate_id::outbox_aggregate_id, payload::outbox_payload,
    headers::outbox_headers));
-- ANALYZE would make the text of each payload that it samples.
ALTER INDEX outbox_owed ALTER COLUMN 1 SET STATISTICS 0, ALTER COLUMN 3 SET STATISTICS 0;

-- These columns define the order of events and which of them are settled. And a change by the transaction that inserts
-- the row would be published in one mode and not in the other.
CREATE FUNCTION outbox_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    mine boolean;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        IF OLD.xid::xid8 <> pg_current_xact_id() THEN
            RAISE EXCEPTION 'these columns must not be updated: they define the order of events and which are settled'
                USING ERRCODE = 'feature_not_supported', HINT = 'delete the row, and insert another one';
        END IF;
    ELSIF TG_OP = 'TRUNCATE' THEN
        EXECUTE pg_catalog.format('SELECT EXISTS (SELECT FROM %s WHERE xid::xid8 = pg_current_xact_id())',
            TG_RELID::regclass) INTO mine;
        IF NOT mine THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION 'the transaction that inserts an event must not change or delete it'
        USING ERRCODE = 'feature_not_supported', HINT = 'insert the event when it is complete';
END $$;
-- The relay of a copy sets the setting while it rewrites the transactions of settled rows.
CREATE TRIGGER outbox_guard BEFORE UPDATE ON outbox FOR EACH ROW
    WHEN (OLD.xid::xid8 = pg_current_xact_id() OR OLD.seq <> NEW.seq OR OLD.id <> NEW.id
        OR OLD.aggregate_type <> NEW.aggregate_type OR OLD.aggregate_id <> NEW.aggregate_id
        OR OLD.xid::xid8 <> NEW.xid::xid8 AND pg_catalog.current_setting('posthaste.copy'::text, true)
            IS DISTINCT FROM 'on'::text) EXECUTE FUNCTION outbox_guard();
CREATE TRIGGER outbox_guard_delete BEFORE DELETE ON outbox FOR EACH ROW
    WHEN (OLD.xid::xid8 = pg_current_xact_id()) EXECUTE FUNCTION outbox_guard();
-- The number may also be of an earlier transaction of the session.
CREATE TRIGGER outbox_guard_truncate BEFORE TRUNCATE ON outbox
    WHEN (pg_catalog.pg_stat_get_xact_tuples_inserted('outbox'::regclass::oid) > 0) EXECUTE FUNCTION outbox_guard();

-- Each sweep worker locks the row of the part that it works on.
CREATE TABLE outbox_part (part smallint PRIMARY KEY CHECK (part BETWEEN 0 AND 15));
INSERT INTO outbox_part SELECT pg_catalog.generate_series(0, 15);
CREATE SEQUENCE outbox_claim; -- numbers the claims of parts: Redis refuses a lower number

-- Marks are only inserted; the newest of a part counts. A mark settles every row of its part whose transaction is
-- visible in settled and whose number is at most hi. During a pass of several pages it also settles the rows that are
-- visible in pass, up to the number cursor.
CREATE TABLE outbox_mark (
    id       bigint      GENERATED ALWAYS AS IDENTITY (START WITH 2) PRIMARY KEY,
    part     smallint    NOT NULL CHECK (part BETWEEN -1 AND 15), -- -1 stands for every part
    epoch    bigint      NOT NULL,
    settled  pg_snapshot, -- NULL: the row only holds pass, which is written before it is used
    hi       bigint      CHECK (hi IS NOT NULL OR settled IS NULL),
    pass     pg_snapshot,
    pass_hi  bigint,
    cursor   bigint,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    mode     text        NOT NULL DEFAULT 'poll' CHECK (mode IN ('cdc', 'poll')),
    -- By stream, the highest entry among those that this mark adds to the mark before it.
    entries  jsonb,
    -- Where the events that this mark adds were published: see outbox_stream_name.
    prefix   text        NOT NULL DEFAULT 'outbox.',
    shards   smallint    NOT NULL DEFAULT 1 CHECK (shards IN (1, 2, 4, 8, 16))
);
CREATE INDEX outbox_mark_part ON outbox_mark (part, id) WHERE settled IS NOT NULL;
-- For the first mark that settles a row. hi IS NOT NULL keeps this index from serving the newest mark of a part.
CREATE INDEX outbox_mark_hi ON outbox_mark (part, hi, id) WHERE settled IS NOT NULL AND hi IS NOT NULL;
CREATE INDEX outbox_mark_cursor ON outbox_mark (part, cursor, id) WHERE cursor IS NOT NULL;
-- At first nothing is settled. The id is below those of all other marks, and of no other database: data are restored.
INSERT INTO outbox_mark (id, part, epoch, settled, hi) OVERRIDING SYSTEM VALUE
VALUES (-(extract(epoch FROM clock_timestamp()) * 1000000::numeric)::bigint, -1, 0, '3:3:', 0);

-- Every stream that was ever published to. The row is committed before the first publish, because an adoption raises
-- the gates of exactly these streams.
CREATE TABLE outbox_stream (
    stream        text    PRIMARY KEY,
    -- The prefix and the type that all streams of a type share.
    base          text    NOT NULL,
    adopted_epoch bigint  NOT NULL,
    -- The gate was raised before: if it does not exist, Redis has lost it.
    gated         boolean NOT NULL DEFAULT false,
    -- Set by posthaste streams drop: events that were settled earlier are not restored.
    dropped_at    timestamptz,
    -- Its consumer groups when a leader last looked. NULL: it is being dropped, and has none until the next adoption.
    groups        text[]  DEFAULT '{}'
);

-- Dead events: the sink refuses them because of what they are.
CREATE TABLE outbox_dead (
    id             uuid         PRIMARY KEY,
    seq            bigint       NOT NULL,
    -- The event's newest row. It is neither unsettled nor delivered, and is deleted together with this row.
    row_seq        bigint,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    event_type     varchar(255) NOT NULL,
    -- NULL if the row could not be read.
    payload        jsonb,
    headers        jsonb,
    created_at     timestamptz  NOT NULL,
    error          text         NOT NULL,
    class          text         NOT NULL,
    attempts       integer      NOT NULL,
    dead_at        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    -- The row that a retry has inserted. When that is settled, and the event is not dead again, this row is deleted.
    retry_seq      bigint,
    -- Set when an operator drops the event. The leader then deletes both rows.
    dropped_at     timestamptz
);
CREATE INDEX outbox_dead_aggregate ON outbox_dead (aggregate_type, aggregate_id);

-- One row: the relay of this table, and its mode.
CREATE TABLE relay_state (
    name              text        PRIMARY KEY CHECK (name ~ '^[a-z0-9_]{1,50}$'),
    desired_mode      text        NOT NULL DEFAULT 'auto' CHECK (desired_mode IN ('auto', 'cdc', 'poll')),
    active_mode       text        NOT NULL DEFAULT 'standby' CHECK (active_mode IN ('cdc', 'poll', 'standby')),
    -- Each adoption raises the epoch. The nonce distinguishes two owners with the same epoch.
    epoch             bigint      NOT NULL DEFAULT 0,
    nonce             bytea       NOT NULL DEFAULT '\x00000000000000000000000000000000'
        CHECK (pg_catalog.octet_length(nonce) = 16),
    -- Everything committed at or before it was swept before streaming began.
    handover_lsn      pg_lsn,
    -- Identifies this database towards Redis.
    source            uuid        NOT NULL DEFAULT gen_random_uuid(),
    -- Where it last led: see outbox_place and outbox_timeline. A copy has others.
    system_identifier bigint,
    database_oid      oid,
    first_migration   bigint,
    timeline          integer,
    owner             text,
    -- The process of Redis that the owner publishes to; NULL if that is not known.
    sink              text,
    -- Before the slot is streamed, every transaction older than this one must have ended. NULL: nothing to wait for.
    -- The greatest bigint: any later transaction will do. A commit that synchronous replication holds back below the
    -- slot's position would otherwise be neither swept nor streamed.
    slot_barrier      bigint,
    -- Why events are swept although cdc is desired; NULL if nothing is wrong.
    degraded          text,
    changed_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE UNIQUE INDEX relay_state_single ON relay_state ((true));

-- Streams that must be compared with the settled events before anything newer is published to them, because Redis or
-- Postgres has lost events that the other still has. An adoption inserts them. Stream '': Postgres has lost commits.
CREATE TABLE outbox_reconcile (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    noticed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    stream       text        NOT NULL,
    -- The gate's newest entry that the stream still has, or '': settled events after it may be missing. NULL: none is.
    after_entry  text,
    -- Nothing settled before this time is missing; NULL if that is not known.
    since        timestamptz,
    -- The gate does not know which unsettled events the stream has: read them from the stream.
    recall       boolean     NOT NULL,
    -- Postgres has gone back in time: events that only the stream has were published and are not committed.
    back         boolean     NOT NULL DEFAULT false,
    -- When it was done; and how many events were compared, published again, found in the stream without a mark, found
    -- there without a commit, and refused.
    done_at      timestamptz,
    expected     bigint      NOT NULL DEFAULT 0,
    restored     bigint      NOT NULL DEFAULT 0,
    recalled     bigint      NOT NULL DEFAULT 0,
    phantoms     bigint      NOT NULL DEFAULT 0,
    refused      bigint      NOT NULL DEFAULT 0,
    -- Everything missing after this mark was published again; NULL if nothing was.
    first_mark   bigint,
    -- Something after this mark may have been restored, up to this entry. If that is lost, the next one begins here.
    touched_mark bigint,
    last_entry   text,
    -- The settled events that were not restored: NULL until counted, -1 if the number is unknown; when the first and
    -- the last of them were settled, which is the range to replay; and when that was done.
    missing      bigint,
    first_at     timestamptz,
    last_at      timestamptz,
    replayed_at  timestamptz,
    -- The leader has reported the missing events, or none can be missing.
    told         boolean     NOT NULL DEFAULT false
);
CREATE INDEX outbox_reconcile_pending ON outbox_reconcile (id) WHERE done_at IS NULL;

-- Events that a stream has, and whose commit this database has lost.
CREATE TABLE outbox_phantom (
    stream     text        NOT NULL,
    entry_id   text        NOT NULL,
    id         uuid        NOT NULL,
    noticed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When an operator acknowledged it, which ends the notice.
    acked_at   timestamptz,
    PRIMARY KEY (stream, entry_id)
);
CREATE INDEX outbox_phantom_noticed ON outbox_phantom (noticed_at) WHERE acked_at IS NULL;

-- Every change that an operator makes, and every one that was refused. Rows are only inserted.
CREATE TABLE posthaste_audit (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The same in the two rows of a change: the one written before it ('begun') and the one of its outcome.
    attempt uuid        NOT NULL,
    outcome text        NOT NULL CHECK (outcome IN ('begun', 'ok', 'refused', 'failed')),
    reason  text        NOT NULL DEFAULT '' CHECK (pg_catalog.octet_length(reason) <= 1024),
    action  text        NOT NULL CHECK (pg_catalog.octet_length(action) <= 64),
    -- The token's role, or the user and host of a terminal; and the address of the peer, or 'terminal'.
    actor   text        NOT NULL CHECK (pg_catalog.octet_length(actor) <= 1024),
    source  text        NOT NULL CHECK (pg_catalog.octet_length(source) <= 1024),
    -- Ids, names and arguments; no payloads.
    detail  jsonb       NOT NULL DEFAULT '{}' CHECK (pg_catalog.octet_length(detail::text) <= 32768),
    role    text        NOT NULL DEFAULT session_user
);
CREATE UNIQUE INDEX posthaste_audit_attempt ON posthaste_audit (attempt, (outcome = 'begun'));
CREATE FUNCTION posthaste_audit_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'posthaste_audit only grows: its rows are neither changed nor deleted' USING ERRCODE = '0A000';
END $$;
CREATE TRIGGER posthaste_audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON posthaste_audit
    FOR EACH STATEMENT EXECUTE FUNCTION posthaste_audit_guard();
