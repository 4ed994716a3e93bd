-- Inserts an order and its event; without an event $13 is NULL. One statement outside a block is one transaction.
-- Returns a row if it inserted, with the server process.
WITH o AS (
    INSERT INTO orders (id, user_id, idem_key, idem_fp, fence, amount, currency, status, resp_status, resp_body,
        created_at, pay_with)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, nullif($12, ''))
    ON CONFLICT DO NOTHING
    RETURNING id
), e AS (
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
    SELECT $13::uuid, $14::text, $15::text, $16::varchar, $17::text::jsonb, $18::text::jsonb FROM o
        WHERE $13::uuid IS NOT NULL
)
SELECT id, pg_catalog.pg_postmaster_start_time() FROM o
