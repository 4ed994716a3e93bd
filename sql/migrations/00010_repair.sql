-- +goose Up

-- What an adoption has to put right in a stream before anything newer is published to it, because one of the two sides has
-- forgotten what the other still knows. Written together with the adoption.
CREATE TABLE outbox_repair (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    noticed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The adoption that noted it.
    epoch       bigint,
    stream      text        NOT NULL,
    -- The last entry that the stream still has of those that its gate has let through, '' without a stream: what is settled behind
    -- it may be missing. NULL: nothing is.
    after_entry text,
    -- Nothing that was settled before this is missing; NULL if that is not known.
    since       timestamptz,
    -- What is in the stream and not settled has to be found there: the gate does not know it.
    recall      boolean     NOT NULL,
    -- This database has gone back in time: what is in the stream and not in the log was published, and is not committed.
    back        boolean     NOT NULL DEFAULT false,
    -- Set when it was done. Behind it: how many events were published again, and how many were found in the stream that Postgres
    -- did not know, or does not.
    done_at     timestamptz,
    expected    bigint      NOT NULL DEFAULT 0,
    restored    bigint      NOT NULL DEFAULT 0,
    recalled    bigint      NOT NULL DEFAULT 0,
    phantoms    bigint      NOT NULL DEFAULT 0,
    -- How many events the stream does not take any more.
    refused     bigint      NOT NULL DEFAULT 0,
    -- The mark behind which everything that was missing was published again, NULL if nothing was.
    first_mark  bigint,
    -- The mark behind which something may have been published again, also by one who did not come to the end; and the stream's last
    -- entry afterwards: who loses that has to look behind the same mark.
    touched_mark bigint,
    last_entry  text
);
CREATE INDEX outbox_repair_pending ON outbox_repair (id) WHERE done_at IS NULL;

-- The adoption that noted it.
ALTER TABLE outbox_loss ADD COLUMN epoch bigint;

-- Events that are in a stream, and whose commit this database has forgotten.
CREATE TABLE outbox_phantom (
    stream     text        NOT NULL,
    entry_id   text        NOT NULL,
    id         uuid        NOT NULL,
    noticed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream, entry_id)
);

-- Nothing of this stream that was settled before is published again: somebody has dropped it.
ALTER TABLE outbox_stream ADD COLUMN dropped_at timestamptz;
-- Its gate was raised before: if it is not there, Redis has forgotten it. Those from before have one.
ALTER TABLE outbox_stream ADD COLUMN gated boolean NOT NULL DEFAULT true;
ALTER TABLE outbox_stream ALTER COLUMN gated SET DEFAULT false;

-- Who counts losses, repairs.
-- +goose StatementBegin
DO $$
DECLARE g record;
BEGIN
    FOR g IN
        SELECT t.name, a.privilege_type AS what, CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(a.grantee)) END AS who
        FROM pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a CROSS JOIN (VALUES ('outbox_repair'), ('outbox_phantom')) AS t(name)
        WHERE c.oid = 'outbox_loss'::regclass::oid AND a.grantee <> c.relowner AND a.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    LOOP
        EXECUTE pg_catalog.format('GRANT %s ON %I TO %s', g.what, g.name, g.who);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose Down
ALTER TABLE outbox_stream DROP COLUMN dropped_at, DROP COLUMN gated;
ALTER TABLE outbox_loss DROP COLUMN epoch;
DROP TABLE outbox_phantom, outbox_repair;
