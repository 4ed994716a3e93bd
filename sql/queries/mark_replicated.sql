-- Waits, by a commit of its own, until a synchronous standby has everything that was committed before. Marks are
-- committed without that wait, because an adoption waits for them and must not wait for a standby that is gone. A
-- commit that has written nothing waits for nothing, so this one writes a message, which no stream of posthaste
-- requests.
SELECT pg_catalog.pg_logical_emit_message(true, 'posthaste', '')::text
