GRANT INSERT ON orders, order_payments TO posthaste_api;
-- A bucket's first operation.
GRANT INSERT (bucket) ON credit_epoch TO posthaste_api;
