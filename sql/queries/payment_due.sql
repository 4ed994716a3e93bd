-- Due payments, with the state of their orders and operations. Moving their time claims them: another recovery, or this
-- one after a crash, finds them later.
WITH taken AS (
    UPDATE order_payments SET due = clock_timestamp() + $2::interval
    WHERE op_id = ANY (ARRAY(SELECT op_id FROM order_payments WHERE due <= clock_timestamp()
        ORDER BY due LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING *
)
SELECT t.op_id, t.refund_id, t.user_id, t.idem_key, t.idem_fp, t.order_id, t.amount, t.currency, t.headers::text,
    t.created_at,
    coalesce(o.status, ''), coalesce(o.pay_with, ''), coalesce(e.outcome, ''), coalesce(r.outcome, ''),
    (extract(epoch FROM clock_timestamp() - t.created_at) * 1000000::numeric)::bigint
FROM taken t
LEFT JOIN orders o ON o.user_id = t.user_id AND o.idem_key = t.idem_key
LEFT JOIN credit_entries e ON e.user_id = t.user_id AND e.op_id = t.op_id
LEFT JOIN credit_entries r ON r.user_id = t.user_id AND r.op_id = t.refund_id
ORDER BY t.created_at
