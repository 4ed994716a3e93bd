-- Most of the time nothing is.
SELECT EXISTS (SELECT FROM order_payments WHERE due <= clock_timestamp())
