-- +goose Up

-- Who changed what: every change that an operator makes, and what was refused. Rows are only inserted.
CREATE TABLE posthaste_audit (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The same in the two rows of a change: the one before it ('begun') and the one of its outcome.
    attempt  uuid        NOT NULL,
    outcome  text        NOT NULL CHECK (outcome IN ('begun', 'ok', 'refused', 'failed')),
    -- Why it was refused, or the class of the failure.
    reason   text        NOT NULL DEFAULT '' CHECK (pg_catalog.octet_length(reason) <= 1024),
    action   text        NOT NULL CHECK (pg_catalog.octet_length(action) <= 64),
    -- The token's role, or the user and host of a terminal; and the address of the peer, or 'terminal'.
    actor    text        NOT NULL CHECK (pg_catalog.octet_length(actor) <= 1024),
    source   text        NOT NULL CHECK (pg_catalog.octet_length(source) <= 1024),
    -- What exactly: ids, names and arguments, no payloads.
    detail   jsonb       NOT NULL DEFAULT '{}' CHECK (pg_catalog.octet_length(detail::text) <= 32768),
    -- The role of Postgres that wrote the row. Nobody else says so.
    role     text        NOT NULL DEFAULT session_user
);
-- One of each.
CREATE UNIQUE INDEX posthaste_audit_attempt ON posthaste_audit (attempt, (outcome = 'begun'));

-- +goose StatementBegin
CREATE FUNCTION posthaste_audit_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'posthaste_audit only grows: its rows are neither changed nor deleted' USING ERRCODE = 'feature_not_supported';
END $$;
-- +goose StatementEnd
CREATE TRIGGER posthaste_audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON posthaste_audit
    FOR EACH STATEMENT EXECUTE FUNCTION posthaste_audit_guard();

-- A relay that does not own the tables writes what its admin listener is asked for.
-- +goose StatementBegin
DO $$
DECLARE g record;
BEGIN
    FOR g IN
        SELECT a.privilege_type AS what, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS who
        FROM pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
        WHERE c.oid = 'outbox_loss'::regclass::oid AND a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT')
    LOOP
        EXECUTE pg_catalog.format('GRANT %s ON posthaste_audit TO %s', g.what, g.who);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
DROP TABLE posthaste_audit;
DROP FUNCTION posthaste_audit_guard();
