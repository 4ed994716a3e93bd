-- Waits, by a commit of its own, until a synchronous standby has everything that was committed before. The marks are committed
-- without that, because an adoption waits for them, and must not wait for a standby that is gone.
SELECT pg_current_xact_id()::text
