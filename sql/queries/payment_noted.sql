SELECT EXISTS (SELECT FROM order_payments WHERE op_id = $1)
