INSERT INTO orders (id, user_id, idem_key, idem_fp, fence, amount, currency, status, resp_status, resp_body, created_at, pay_with)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, nullif($12, ''))
ON CONFLICT DO NOTHING
RETURNING id
