INSERT INTO order_payments (op_id, refund_id, user_id, idem_key, idem_fp, order_id, amount, currency, headers,
    created_at, due)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, clock_timestamp() + $11::interval
WHERE NOT EXISTS (SELECT FROM orders WHERE user_id = $3 AND idem_key = $4)
ON CONFLICT DO NOTHING
