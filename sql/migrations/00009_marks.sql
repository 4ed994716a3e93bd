-- +goose Up

-- outbox becomes a log: a row stays when it is settled, and is its own history. What is settled is said by marks.

-- The transaction that wrote the row. Nobody writes it. The default is stable, so no row is rewritten: rows that are there get
-- this transaction's id, and are owed.
ALTER TABLE outbox ADD COLUMN xid xid8 NOT NULL DEFAULT pg_current_xact_id();
-- How rows that are owed are found: by their transaction, because a number says nothing of when a row became visible.
CREATE INDEX outbox_owed ON outbox (part, xid);
-- The same limits without making a text of the payload a second time, and without a regular expression: a third of what a row
-- of a large transaction costs.
ALTER TABLE outbox DROP CONSTRAINT outbox_aggregate_type_check, DROP CONSTRAINT outbox_payload_check,
    ADD CONSTRAINT outbox_aggregate_type_check CHECK (pg_catalog.octet_length(aggregate_type) BETWEEN 1 AND 64
        AND pg_catalog.ltrim(aggregate_type, 'abcdefghijklmnopqrstuvwxyz_.:-ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789') = ''),
    ADD CONSTRAINT outbox_payload_check CHECK (bytes - coalesce(pg_catalog.octet_length(headers::text), 0) - pg_catalog.octet_length(aggregate_id) <= 8388608);
-- It is no queue any more: to vacuum it after a fixed number of rows would be to read its indexes every few seconds.
ALTER TABLE outbox SET (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05
);

-- Marks, each a row that is inserted once; the newest of a part counts. A mark says that every row of its part is settled
-- (published or parked) whose transaction is visible in settled and whose number is not above hi. During a pass of several
-- pages it also says that of the rows that are visible in pass, up to cursor.
CREATE TABLE outbox_mark (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- -1 is every part.
    part     smallint    NOT NULL CHECK (part BETWEEN -1 AND 15),
    epoch    bigint      NOT NULL,
    -- NULL where nothing is said yet: pass was written before it is used.
    settled  pg_snapshot,
    hi       bigint,
    pass     pg_snapshot,
    pass_hi  bigint,
    cursor   bigint,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    mode     text        CHECK (mode IN ('cdc', 'poll')),
    -- By stream, the highest entry of what this mark adds to the one before.
    entries  jsonb
);
CREATE INDEX outbox_mark_part ON outbox_mark (part, id) WHERE settled IS NOT NULL;
-- When a row was settled: by the first mark of these that sees it. (hi is there wherever settled is: said so that nobody looks
-- for the newest mark of a part here.)
CREATE INDEX outbox_mark_hi ON outbox_mark (part, hi, id) WHERE settled IS NOT NULL AND hi IS NOT NULL;
CREATE INDEX outbox_mark_cursor ON outbox_mark (part, cursor, id) WHERE cursor IS NOT NULL;
-- Nothing is settled: what is in the table now is owed.
INSERT INTO outbox_mark (part, epoch, settled, hi) VALUES (-1, 0, '3:3:', 0);

-- What sweep workers number their claims with. outbox_part stays for instances that are not replaced yet.
CREATE SEQUENCE outbox_claim;
SELECT pg_catalog.setval('outbox_claim', (SELECT pg_catalog.max(claim) + 1 FROM outbox_part));

-- The row of the log that was parked last: it stays, and is neither owed nor delivered, until this row goes and takes it along.
ALTER TABLE outbox_dead ADD COLUMN row_seq bigint,
    -- Somebody has given the event up; the leader deletes both.
    ADD COLUMN dropped_at timestamptz;

-- What the names of streams begin with, as the owner has it.
ALTER TABLE relay_state ADD COLUMN prefix text NOT NULL DEFAULT 'outbox.';

-- What was delivered before this migration, until its retention ends.
ALTER TABLE outbox_history RENAME TO outbox_history_old;

-- The newest mark of each part, and the transactions that it knows to be running. A range of one part, in the order of the part's
-- index: with equality the order is that of the primary key, too, and a part that has no mark of its own for long would be
-- looked for in all.
CREATE VIEW outbox_settled AS
SELECT p.part::smallint AS part, m.id AS mark, m.settled, m.hi, m.pass, m.pass_hi, m.cursor, ARRAY(SELECT pg_catalog.pg_snapshot_xip(m.settled)) AS running
FROM pg_catalog.generate_series(0, 15) AS p(part)
CROSS JOIN LATERAL (
    SELECT n.* FROM (
        (SELECT * FROM outbox_mark WHERE part >= p.part::smallint AND part <= p.part::smallint AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark WHERE part >= -1 AND part <= -1 AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
    ) n ORDER BY n.id DESC LIMIT 1
) m;

-- Rows that are not settled.
CREATE VIEW outbox_backlog AS
SELECT o.part, o.seq, o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.payload, o.headers, o.created_at, o.bytes, o.xid
FROM outbox_settled m
CROSS JOIN LATERAL (
    SELECT r.* FROM outbox r WHERE r.part = m.part AND r.xid = ANY (m.running)
    UNION ALL
    SELECT r.* FROM outbox r WHERE r.part = m.part AND r.xid >= pg_catalog.pg_snapshot_xmax(m.settled)
) o
WHERE (m.pass IS NULL OR o.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.pass))
  AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq);

-- What was delivered: the log as far as it is settled, with when its mark was written; and what was delivered before there
-- were marks.
CREATE VIEW outbox_history AS
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

-- Who may read, or write, what these were made of, or took the place of, may do it with them. Not where policies say which rows
-- one may read: a view shows them all.
-- +goose StatementBegin
DO $$
DECLARE g record;
BEGIN
    FOR g IN
        SELECT v.view, a.privilege_type AS what, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS who
        FROM (VALUES ('outbox_history', 'outbox_history_old'), ('outbox_backlog', 'outbox'), ('outbox_settled', 'outbox')) AS v(view, source)
        JOIN pg_class c ON c.oid = v.source::regclass::oid
        CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
        WHERE (a.privilege_type = 'SELECT' AND NOT c.relrowsecurity AND NOT EXISTS (SELECT FROM pg_class WHERE oid = 'outbox'::regclass::oid AND relrowsecurity))
           OR a.privilege_type = 'INSERT' AND v.view = 'outbox_history'
    LOOP
        EXECUTE pg_catalog.format('GRANT %s ON %I TO %s', g.what, g.view, g.who);
    END LOOP;
END $$;
-- +goose StatementEnd

-- What an instance that is not replaced yet settles goes to where it was.
-- +goose StatementBegin
CREATE FUNCTION outbox_history_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE pg_catalog.format('INSERT INTO %I.outbox_history_old SELECT ($1).*', TG_TABLE_SCHEMA) USING NEW;
    RETURN NEW;
END $$;
-- +goose StatementEnd
-- Whoever deletes may have another search_path, and no right to read marks.
-- +goose StatementBegin
CREATE FUNCTION outbox_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE marked boolean;
BEGIN
    IF pg_catalog.current_setting('posthaste.marks', true) = 'on' THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        RAISE EXCEPTION 'the order of events, and what is settled, hang on these columns: they are not changed'
            USING ERRCODE = 'feature_not_supported', HINT = 'delete the row, and insert another one';
    END IF;
    IF pg_catalog.current_setting('application_name') LIKE 'posthaste %' THEN
        EXECUTE pg_catalog.format('SELECT EXISTS (SELECT FROM %I.outbox_mark WHERE epoch > 0)', TG_TABLE_SCHEMA) INTO marked;
        IF marked THEN
            RAISE EXCEPTION 'a newer posthaste has taken over, and settles nothing by deleting it'
                USING ERRCODE = 'feature_not_supported', HINT = 'stop this instance, or upgrade it';
        END IF;
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd
CREATE TRIGGER outbox_history_keep INSTEAD OF INSERT ON outbox_history FOR EACH ROW EXECUTE FUNCTION outbox_history_keep();
CREATE TRIGGER outbox_guard BEFORE DELETE OR UPDATE OF seq, id, aggregate_id, xid ON outbox
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_guard();

-- Those who only write events write no marks, and not the transaction: what is settled hangs on them. (A relay may update its
-- state.)
-- +goose StatementBegin
DO $$
DECLARE g record;
BEGIN
    FOR g IN
        SELECT c.relname, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS who
        FROM pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
        WHERE c.oid IN ('outbox'::regclass::oid, 'outbox_mark'::regclass::oid) AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
          AND NOT a.is_grantable AND NOT pg_catalog.has_table_privilege(a.grantee, 'relay_state', 'UPDATE')
    LOOP
        EXECUTE pg_catalog.format('REVOKE INSERT ON %I FROM %s', g.relname, g.who);
        IF g.relname = 'outbox' THEN
            EXECUTE pg_catalog.format('GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at) ON outbox TO %s', g.who);
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP TRIGGER outbox_guard ON outbox;
-- What is settled goes to where it was before there were marks.
INSERT INTO outbox_history_old (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, mode)
SELECT h.seq, h.id, h.aggregate_type, h.aggregate_id, h.event_type, h.payload, h.headers, h.created_at, h.published_at, h.stream, h.mode
FROM outbox_history h JOIN outbox o ON o.seq = h.seq AND o.id = h.id;
DELETE FROM outbox o WHERE NOT EXISTS (SELECT FROM outbox_backlog b WHERE b.part = o.part AND b.seq = o.seq);
DROP VIEW outbox_history, outbox_backlog, outbox_settled;
DROP FUNCTION outbox_history_keep(), outbox_guard();
ALTER TABLE outbox_history_old RENAME TO outbox_history;
ALTER TABLE relay_state DROP COLUMN prefix;
DELETE FROM outbox_dead WHERE dropped_at IS NOT NULL;
ALTER TABLE outbox_dead DROP COLUMN row_seq, DROP COLUMN dropped_at;
UPDATE outbox_part SET claim = greatest(claim, (SELECT last_value FROM outbox_claim));
DROP SEQUENCE outbox_claim;
DROP TABLE outbox_mark;
DROP INDEX outbox_owed;
ALTER TABLE outbox SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_analyze_scale_factor = 0);
ALTER TABLE outbox DROP CONSTRAINT outbox_aggregate_type_check, DROP CONSTRAINT outbox_payload_check, DROP COLUMN xid,
    ADD CONSTRAINT outbox_aggregate_type_check CHECK (aggregate_type ~ '^[a-zA-Z0-9_.:-]{1,64}$'),
    ADD CONSTRAINT outbox_payload_check CHECK (pg_catalog.octet_length(payload::text) <= 8388608);
