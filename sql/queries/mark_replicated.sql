-- Waits, by a commit of its own, until a synchronous standby has everything that was committed before. The marks are committed
-- without that, because an adoption waits for them, and must not wait for a standby that is gone. A commit that has written
-- nothing waits for nothing: so it writes a message, which no stream of ours asks for.
SELECT pg_catalog.pg_logical_emit_message(true, 'posthaste', '')::text
