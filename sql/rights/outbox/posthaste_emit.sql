-- A service that only emits events. The other columns fill themselves.
GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers) ON outbox TO posthaste_emit;
GRANT EXECUTE ON FUNCTION outbox_publish TO posthaste_emit;
