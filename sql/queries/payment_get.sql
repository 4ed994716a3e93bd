SELECT idem_fp, order_id, created_at, headers::text FROM order_payments
WHERE op_id = $1 AND NOT EXISTS (SELECT FROM orders WHERE user_id = $2 AND idem_key = $3)
