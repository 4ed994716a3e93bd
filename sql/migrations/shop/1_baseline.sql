-- Orders. The unique key makes a second order for one idempotency key impossible, whatever Redis does.
CREATE TABLE orders (
    id          uuid        PRIMARY KEY,
    user_id     uuid        NOT NULL,
    -- The first 16 bytes of a SHA-256 over the key and its scope; the key itself is never stored.
    idem_key    bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_key) = 16),
    -- The fingerprint of the validated command: the same key with another command is refused.
    idem_fp     bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_fp) BETWEEN 1 AND 33),
    -- The guard's token when the order was written; 0 without the guard. No decision depends on it.
    fence       bigint      NOT NULL DEFAULT 0,
    amount      bigint      NOT NULL CHECK (amount > 0 AND amount <= 999999999999999),
    currency    char(3)     NOT NULL CHECK (currency ~ '^[A-Z]{3}$'::text),
    -- A refusal for business reasons is a row, too: one unique key decides between success and refusal.
    status      text        NOT NULL CHECK (status IN ('PENDING', 'REJECTED')),
    resp_status smallint,
    resp_body   bytea,
    created_at  timestamptz NOT NULL,
    -- How the order is paid; NULL if this program does not pay it. A paid order is written after its payment.
    pay_with    text        CHECK (pay_with = 'credits'),
    CHECK ((status = 'REJECTED') = (resp_status IS NOT NULL)),
    UNIQUE (user_id, idem_key)
);
-- Lists a user's orders, newest first; ids are UUIDv7.
CREATE INDEX orders_user ON orders (user_id, id DESC) WHERE status <> 'REJECTED';
CREATE INDEX orders_rejected ON orders (created_at) WHERE status = 'REJECTED';

-- Payments by credits in progress: inserted before the deduction, deleted when ledger and order agree. The deduction's
-- id derives from the order's idempotency key, so that each key has one deduction, however many attempts there are.
CREATE TABLE order_payments (
    -- The ids in credit_entries of the deduction, and of the addition that reverses it.
    op_id      uuid        PRIMARY KEY,
    refund_id  uuid        NOT NULL,
    -- The order that will be written.
    user_id    uuid        NOT NULL,
    idem_key   bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_key) = 16),
    idem_fp    bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_fp) BETWEEN 1 AND 33),
    order_id   uuid        NOT NULL,
    amount     bigint      NOT NULL CHECK (amount BETWEEN 1 AND 999999999999),
    currency   char(3)     NOT NULL CHECK (currency ~ '^[A-Z]{3}$'::text),
    headers    jsonb,
    created_at timestamptz NOT NULL,
    -- When the relay checks it next; NULL if it needs an operator.
    due        timestamptz
);
CREATE INDEX order_payments_due ON order_payments (due) WHERE due IS NOT NULL;

-- The ledger of credits. Redis holds the balances. The ledger is written from Redis' streams, and balances are rebuilt
-- from it.

-- One row for each bucket of users. The process that applies a bucket's stream locks its row.
CREATE TABLE credit_epoch (
    bucket    smallint    PRIMARY KEY CHECK (bucket BETWEEN 0 AND 255),
    -- Redis may change balances under this number only. It is raised when Redis has lost something.
    epoch     bigint      NOT NULL DEFAULT 1 CHECK (epoch > 0),
    -- The number of the last operation that was read from the bucket's stream, committed together with it.
    mark      bigint      NOT NULL DEFAULT 0 CHECK (mark >= 0),
    -- When epoch was raised; NULL for never.
    bumped_at timestamptz,
    -- The counter-account of the bucket's accounts: additions less deductions, moved in the transaction that applies
    -- the operation. An account that vanishes leaves a difference.
    issued    bigint      NOT NULL DEFAULT 0
);

CREATE TABLE credit_accounts (
    user_id    uuid        PRIMARY KEY,
    -- The sum of the account's entries, and the number of the last one.
    balance    bigint      NOT NULL CHECK (balance BETWEEN 0 AND 999999999999999),
    last_seq   bigint      NOT NULL CHECK (last_seq >= 0),
    -- Why the account was stopped; NULL for an account in use.
    frozen     text,
    -- When Redis took the last entry.
    updated_at timestamptz NOT NULL
);
CREATE INDEX credit_accounts_frozen ON credit_accounts (user_id) WHERE frozen IS NOT NULL;

-- Rows are only inserted. A refusal is a row, too: its operation id cannot be used again.
CREATE TABLE credit_entries (
    user_id       uuid        NOT NULL,
    -- Without gaps for each user, refusals included.
    seq           bigint      NOT NULL CHECK (seq > 0),
    -- A hash of the idempotency key and its scope, and the id of the event.
    op_id         uuid        NOT NULL,
    fp            bytea       NOT NULL CHECK (pg_catalog.octet_length(fp) BETWEEN 1 AND 33),
    kind          text        NOT NULL CHECK (kind IN ('add', 'deduct')),
    outcome       text        NOT NULL CHECK (outcome IN ('OK', 'INSUFFICIENT', 'OVERFLOW')),
    amount        bigint      NOT NULL CHECK (amount BETWEEN 1 AND 999999999999),
    balance_after bigint      NOT NULL CHECK (balance_after BETWEEN 0 AND 999999999999999),
    reference     text        NOT NULL DEFAULT '',
    durability    text        NOT NULL CHECK (durability IN ('memory', 'replicated', 'fsynced')),
    epoch         bigint      NOT NULL,
    stream_id     text        NOT NULL,
    created_at    timestamptz NOT NULL,
    PRIMARY KEY (user_id, seq),
    UNIQUE (user_id, op_id)
);

-- Stream entries that contradict the ledger. Their users' accounts are frozen; others are not affected.
CREATE TABLE credit_quarantine (
    bucket    smallint    NOT NULL,
    stream_id text        NOT NULL,
    user_id   uuid,
    reason    text        NOT NULL,
    entry     jsonb       NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The entry is part of the key: after a loss Redis may use an id again.
    PRIMARY KEY (bucket, stream_id, entry)
);
