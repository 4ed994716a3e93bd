UPDATE order_payments SET due = clock_timestamp() + $2::interval WHERE op_id = $1
