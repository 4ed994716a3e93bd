DELETE FROM order_payments WHERE op_id = $1
