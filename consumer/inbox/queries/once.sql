-- $4: the limit for a transaction that holds a note and does nothing, unless the session has one of its own.
WITH bound AS (
    SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', $4, true)
    WHERE pg_catalog.current_setting('idle_in_transaction_session_timeout') = '0'
)
INSERT INTO inbox (day, consumer_group, event_id)
SELECT $1::date, $2::text, $3::uuid FROM (SELECT count(*) FROM bound) AS executed
ON CONFLICT DO NOTHING
