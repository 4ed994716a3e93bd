-- +goose Up

-- Postgres arbitrates: the unique key makes a second order for one idempotency key impossible, whatever Redis does.
CREATE TABLE orders (
    id         uuid        PRIMARY KEY,
    user_id    uuid        NOT NULL,
    -- The first 16 bytes of a SHA-256 over the key and its scope; the key itself is never stored.
    idem_key   bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_key) = 16),
    -- The fingerprint of the validated command: the same key with another one is refused.
    idem_fp    bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_fp) BETWEEN 1 AND 33),
    -- The guard's token when the order was written; 0 without the guard. For people, not for decisions.
    fence      bigint      NOT NULL DEFAULT 0,
    amount     bigint      NOT NULL CHECK (amount > 0 AND amount <= 999999999999999),
    currency   char(3)     NOT NULL CHECK (currency ~ '^[A-Z]{3}$'::text),
    -- A refusal for business reasons is a row too, under the same unique key: one index arbitrates success against
    -- refusal.
    status     text        NOT NULL CHECK (status IN ('PENDING', 'REJECTED')),
    resp_status smallint,
    resp_body  bytea,
    created_at timestamptz NOT NULL,
    CHECK ((status = 'REJECTED') = (resp_status IS NOT NULL)),
    UNIQUE (user_id, idem_key)
);
-- Listing a user's orders, newest first; ids are UUIDv7.
CREATE INDEX orders_user ON orders (user_id, id DESC) WHERE status <> 'REJECTED';
-- Purging refusals by age.
CREATE INDEX orders_rejected ON orders (created_at) WHERE status = 'REJECTED';

-- +goose Down
DROP TABLE orders;
