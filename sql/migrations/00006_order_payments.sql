-- +goose Up

-- How an order is paid; NULL for the orders that are not this program's to pay. An order is written when it is paid for,
-- so that no reader ever meets one that is not.
ALTER TABLE orders ADD COLUMN pay_with text CHECK (pay_with = 'credits');

-- What is being paid by credits: noted before the deduction, and deleted once ledger and order agree. The deduction's id
-- is made of the order's idempotency key, so that there is one deduction per key however many attempts there are.
CREATE TABLE order_payments (
    -- The deduction's id in credit_entries, and that of the addition that takes it back.
    op_id      uuid        PRIMARY KEY,
    refund_id  uuid        NOT NULL,
    user_id    uuid        NOT NULL,
    -- The order's key and fingerprint, and what it will be.
    idem_key   bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_key) = 16),
    idem_fp    bytea       NOT NULL CHECK (pg_catalog.octet_length(idem_fp) BETWEEN 1 AND 33),
    order_id   uuid        NOT NULL,
    amount     bigint      NOT NULL CHECK (amount BETWEEN 1 AND 999999999999),
    currency   char(3)     NOT NULL CHECK (currency ~ '^[A-Z]{3}$'::text),
    -- Of the order's event; NULL for none.
    headers    jsonb,
    created_at timestamptz NOT NULL,
    -- When it is looked at next; NULL when only a human can help.
    due        timestamptz
);
CREATE INDEX order_payments_due ON order_payments (due) WHERE due IS NOT NULL;

-- The counter-account of a bucket's accounts, so that the ledger has two entries for each operation: what was added less
-- what was deducted, moved in the transaction that takes the operation. An account that vanishes leaves a difference.
ALTER TABLE credit_epoch ADD COLUMN issued bigint NOT NULL DEFAULT 0;
UPDATE credit_epoch e SET issued = s.total
FROM (SELECT pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.uuid_send(user_id)), 0) AS bucket, pg_catalog.sum(balance) AS total FROM credit_accounts GROUP BY 1) s
WHERE s.bucket = e.bucket;

-- +goose Down
ALTER TABLE credit_epoch DROP COLUMN issued;
DROP TABLE order_payments;
ALTER TABLE orders DROP COLUMN pay_with;
