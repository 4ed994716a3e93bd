-- posthaste serve, in addition to reading posthaste's tables: the events of orders, and the audit of its admin
-- listener.
GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers) ON outbox TO posthaste_api;
GRANT INSERT (attempt, outcome, reason, action, actor, source, detail) ON posthaste_audit TO posthaste_api;
