-- What serve may do beside reading posthaste's tables.
GRANT INSERT ON orders, order_payments TO posthaste_api;
GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers) ON outbox TO posthaste_api;
-- A bucket's first operation.
GRANT INSERT (bucket) ON credit_epoch TO posthaste_api;
-- What its admin listener is asked to change.
GRANT INSERT (attempt, outcome, reason, action, actor, source, detail) ON posthaste_audit TO posthaste_api;
