-- Usually no payment is due.
SELECT EXISTS (SELECT FROM order_payments WHERE due <= clock_timestamp())
