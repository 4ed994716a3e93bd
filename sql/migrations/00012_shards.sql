-- +goose Up

-- How many streams a type has: prefix.type with one; otherwise prefix.type.n, where n is the remainder of the part. It is what
-- counts, whatever a relay is configured with, until the owner of the table has changed it.
ALTER TABLE relay_state ADD COLUMN shards smallint NOT NULL DEFAULT 1 CHECK (shards IN (1, 2, 4, 8, 16)),
    -- The owner knows of it: an instance of an earlier version, which would publish to other streams, cannot adopt.
    ADD COLUMN shards_epoch bigint NOT NULL DEFAULT 0,
    ADD CONSTRAINT relay_state_shards_known CHECK (shards = 1 OR shards_epoch = epoch),
    -- Poll mode has another name here where a type has several streams: an instance of an earlier version does not sweep along.
    DROP CONSTRAINT relay_state_active_mode_check,
    ADD CONSTRAINT relay_state_active_mode_check CHECK (active_mode IN ('cdc', 'standby', CASE WHEN shards = 1 THEN 'poll' ELSE 'poll.n' END));

-- What it was before, oldest first: the rows that the snapshot sees, up to the number, and that no earlier line holds. When it was
-- changed, these were settled, and no other: so a row of the log tells in which stream its event is.
CREATE TABLE outbox_layout (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shards   smallint    NOT NULL,
    -- The owner that has changed it, and when.
    epoch    bigint      NOT NULL,
    ended_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    settled  pg_snapshot NOT NULL,
    hi       bigint      NOT NULL
);

-- What the names of the streams of a type have in common: the name of its only one. (An instance of an earlier version does not
-- say it.)
ALTER TABLE outbox_stream ADD COLUMN base text;
UPDATE outbox_stream SET base = stream;

-- As before, but for the stream.
CREATE OR REPLACE VIEW outbox_history AS
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode, event_time
FROM outbox_history_old
UNION ALL
SELECT o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
    CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE m.at END,
    m.at,
    (SELECT r.prefix FROM relay_state r) || o.aggregate_type || coalesce('.'::text || (o.part % nullif(coalesce(
        (SELECT l.shards FROM outbox_layout l WHERE o.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, l.settled) ORDER BY l.id LIMIT 1),
        (SELECT r.shards FROM relay_state r)), 1::smallint))::text, ''::text),
    NULL, coalesce(m.mode, 'poll'), NULL
FROM outbox o
CROSS JOIN LATERAL (
    SELECT k.at, k.mode FROM (
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = o.part AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled)
         ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = -1 AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled)
         ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = o.part AND cursor >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, pass)
         ORDER BY cursor, id LIMIT 1)
    ) k ORDER BY k.id LIMIT 1
) m
WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq);

-- Who may read, or keep, which streams there are.
-- +goose StatementBegin
DO $$
DECLARE g record;
BEGIN
    FOR g IN
        SELECT a.privilege_type AS what, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS who
        FROM pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
        WHERE c.oid = 'outbox_loss'::regclass::oid AND a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT', 'DELETE')
    LOOP
        EXECUTE pg_catalog.format('GRANT %s ON outbox_layout TO %s', g.what, g.who);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
CREATE OR REPLACE VIEW outbox_history AS
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode, event_time
FROM outbox_history_old
UNION ALL
SELECT o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers,
    CASE WHEN pg_catalog.isfinite(o.created_at) THEN o.created_at ELSE m.at END,
    m.at, (SELECT r.prefix FROM relay_state r) || o.aggregate_type, NULL, coalesce(m.mode, 'poll'), NULL
FROM outbox o
CROSS JOIN LATERAL (
    SELECT k.at, k.mode FROM (
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = o.part AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled)
         ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = -1 AND settled IS NOT NULL AND hi >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, settled)
         ORDER BY hi, id LIMIT 1)
        UNION ALL
        (SELECT id, at, mode FROM outbox_mark
         WHERE part = o.part AND cursor >= o.seq AND pg_catalog.pg_visible_in_snapshot(o.xid, pass)
         ORDER BY cursor, id LIMIT 1)
    ) k ORDER BY k.id LIMIT 1
) m
WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq);
DROP TABLE outbox_layout;
ALTER TABLE outbox_stream DROP COLUMN base;
ALTER TABLE relay_state DROP CONSTRAINT relay_state_shards_known, DROP CONSTRAINT relay_state_active_mode_check;
UPDATE relay_state SET active_mode = 'poll' WHERE active_mode = 'poll.n';
ALTER TABLE relay_state DROP COLUMN shards, DROP COLUMN shards_epoch,
    ADD CONSTRAINT relay_state_active_mode_check CHECK (active_mode IN ('cdc', 'poll', 'standby'));
