-- +goose Up

-- A row in outbox is an event that is not yet known to be delivered; nothing else marks it. It is public: any service
-- may insert (id, aggregate_type, aggregate_id, event_type, payload[, headers]) in its own transaction.
CREATE TABLE outbox (
    -- All events of one aggregate fall into one part, so a sweeper that owns the part keeps their order.
    part           smallint     NOT NULL GENERATED ALWAYS AS ((pg_catalog.hashtextextended(aggregate_id, 0) & 15::bigint)::smallint) STORED,
    -- CACHE stays 1: a cached sequence would give a later insert of the same aggregate a smaller number.
    seq            bigint       NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
    id             uuid         NOT NULL,
    -- Braces would split a stream and its gate over two Cluster slots.
    aggregate_type text         NOT NULL CHECK (aggregate_type ~ '^[a-zA-Z0-9_.:-]{1,64}$'),
    aggregate_id   text         NOT NULL CHECK (pg_catalog.octet_length(aggregate_id) <= 1024),
    event_type     varchar(255) NOT NULL,
    -- 2 kB of jsonb can be 1 GB as text, and one such row would stop every reader forever.
    payload        jsonb        NOT NULL CHECK (pg_catalog.octet_length(payload::text) <= 8388608),
    headers        jsonb                 CHECK (pg_catalog.octet_length(headers::text) <= 65536),
    created_at     timestamptz  NOT NULL DEFAULT clock_timestamp(),
    -- What a sweeper bounds a batch by, computed once at the insert instead of at every read.
    bytes          integer      NOT NULL GENERATED ALWAYS AS
        (pg_catalog.octet_length(payload::text) + coalesce(pg_catalog.octet_length(headers::text), 0) + pg_catalog.octet_length(aggregate_id)) STORED,
    -- The only index: one index per insert is what keeps writes cheap.
    PRIMARY KEY (part, seq)
) WITH (
    -- A queue is always young: vacuum after a fixed number of dead rows, not after a share of a table that is empty,
    -- and without pauses. Rows are never updated, so pages may be filled completely (fillfactor stays 100).
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    -- Truncating the end of the table takes an exclusive lock that inserts would wait for.
    vacuum_truncate = false
);

-- The receipt of every delivered event: what trace and replay read. Dropped by the day, never deleted row by row.
CREATE TABLE outbox_history (
    seq            bigint       NOT NULL,
    id             uuid         NOT NULL,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    event_type     varchar(255) NOT NULL,
    payload        jsonb        NOT NULL,
    headers        jsonb,
    created_at     timestamptz  NOT NULL,
    published_at   timestamptz  NOT NULL,
    stream         text         NOT NULL,
    -- NULL when an earlier owner published the event and its gate no longer says where.
    entry_id       text,
    mode           text         NOT NULL CHECK (mode IN ('cdc', 'poll'))
) PARTITION BY RANGE (published_at);
-- What trace looks for: an event, or what became of an order.
CREATE INDEX outbox_history_id ON outbox_history (id);
CREATE INDEX outbox_history_aggregate ON outbox_history (aggregate_id);
-- Catches what falls outside the partitions the leader makes ahead, so that a clock or a missing right loses nothing.
CREATE TABLE outbox_history_default PARTITION OF outbox_history DEFAULT;

-- What sweep workers claim. The counter is raised at every claim and fences the part's lane in Redis.
CREATE TABLE outbox_part (
    part  smallint PRIMARY KEY CHECK (part BETWEEN 0 AND 15),
    claim bigint   NOT NULL DEFAULT 0
);
INSERT INTO outbox_part (part) SELECT pg_catalog.generate_series(0, 15);

-- Every stream ever published to; a row is committed before the stream's first publish, because an adoption raises the
-- gates of exactly these streams.
CREATE TABLE outbox_stream (
    stream        text   PRIMARY KEY,
    adopted_epoch bigint NOT NULL
);

-- Parked events: refused by the sink for their own sake.
CREATE TABLE outbox_dead (
    id             uuid         PRIMARY KEY,
    seq            bigint       NOT NULL,
    aggregate_type text         NOT NULL,
    aggregate_id   text         NOT NULL,
    event_type     varchar(255) NOT NULL,
    -- NULL when the row could not even be read.
    payload        jsonb,
    headers        jsonb,
    created_at     timestamptz  NOT NULL,
    error          text         NOT NULL,
    class          text         NOT NULL,
    attempts       integer      NOT NULL,
    dead_at        timestamptz  NOT NULL DEFAULT clock_timestamp(),
    -- Set by a retry: the number of the row put back into outbox. When that row is gone and the event was not parked
    -- again, it is published, and this row goes too.
    retry_seq      bigint
);
CREATE INDEX outbox_dead_aggregate ON outbox_dead (aggregate_type, aggregate_id);

-- One row: who relays this table, and in which mode.
CREATE TABLE relay_state (
    name              text        PRIMARY KEY CHECK (name ~ '^[a-z0-9_]{1,50}$'),
    desired_mode      text        NOT NULL DEFAULT 'auto' CHECK (desired_mode IN ('auto', 'cdc', 'poll')),
    active_mode       text        NOT NULL DEFAULT 'standby' CHECK (active_mode IN ('cdc', 'poll', 'standby')),
    -- The fencing token, raised by one at every adoption, and the nonce that tells two holders of one number apart.
    epoch             bigint      NOT NULL DEFAULT 0,
    nonce             bytea       NOT NULL DEFAULT '\x00000000000000000000000000000000' CHECK (pg_catalog.octet_length(nonce) = 16),
    -- Everything committed at or below it was looked up in the table before it was streamed.
    handover_lsn      pg_lsn,
    -- This database's identity towards Redis.
    source            uuid        NOT NULL DEFAULT gen_random_uuid(),
    system_identifier bigint,
    timeline          integer,
    owner             text,
    -- Why events flow by the sweep although the stream is wanted; NULL when nothing is wrong.
    degraded          text,
    changed_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);
-- One table, one relay name.
CREATE UNIQUE INDEX relay_state_single ON relay_state ((true));

-- Before any slot, always: a slot older than its publication cannot be decoded. Inserts only, because a delete is
-- how the relay settles, and needs no announcement.
CREATE PUBLICATION posthaste FOR TABLE outbox WITH (publish = 'insert');

-- +goose Down
DROP PUBLICATION IF EXISTS posthaste;
DROP TABLE relay_state, outbox_dead, outbox_stream, outbox_part, outbox_history, outbox;
