-- +goose Up

-- The ledger of credits. The balance lives in Redis; what happened to it is written here, from Redis' streams, and is
-- what a balance is rebuilt from.

-- One row per bucket of users that was ever used. Whoever applies a bucket's stream holds its row locked.
CREATE TABLE credit_epoch (
    bucket    smallint    PRIMARY KEY CHECK (bucket BETWEEN 0 AND 255),
    -- Redis may change balances under this number only. Raised when Redis was found to have lost something.
    epoch     bigint      NOT NULL DEFAULT 1 CHECK (epoch > 0),
    -- The number of the bucket's last operation that was taken out of its stream. Committed with what it stands for.
    mark      bigint      NOT NULL DEFAULT 0 CHECK (mark >= 0),
    -- NULL: never raised.
    bumped_at timestamptz
);

CREATE TABLE credit_accounts (
    user_id    uuid        PRIMARY KEY,
    -- The sum of the account's entries, and the last one's number.
    balance    bigint      NOT NULL CHECK (balance BETWEEN 0 AND 999999999999999),
    last_seq   bigint      NOT NULL CHECK (last_seq >= 0),
    -- Why the account was stopped; NULL for an account in use.
    frozen     text,
    -- When Redis took the last entry.
    updated_at timestamptz NOT NULL
);
CREATE INDEX credit_accounts_frozen ON credit_accounts (user_id) WHERE frozen IS NOT NULL;

-- Append-only. A refusal is a row too: its operation id is used up forever, like a success's.
CREATE TABLE credit_entries (
    user_id       uuid        NOT NULL,
    -- Gapless per user, refusals included.
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

-- Stream entries that contradict the ledger, as they were: their users are frozen, everybody else goes on.
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

-- +goose Down
DROP TABLE credit_quarantine, credit_entries, credit_accounts, credit_epoch;
