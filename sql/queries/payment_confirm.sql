-- The usual end: the order is there and its deduction is in the ledger.
DELETE FROM order_payments WHERE op_id = ANY (ARRAY(
    SELECT p.op_id FROM order_payments p
    JOIN orders o ON o.user_id = p.user_id AND o.idem_key = p.idem_key AND o.status = 'PENDING'
        AND o.pay_with = 'credits'
    JOIN credit_entries e ON e.user_id = p.user_id AND e.op_id = p.op_id AND e.outcome = 'OK'
    WHERE p.due <= clock_timestamp() LIMIT $1))
