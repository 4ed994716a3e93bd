-- Functions of the inbox for writers of any language. Each migration of the inbox replaces them.

-- Notes that a group has handled an event, and returns whether that is new. It does what inbox.Once of consumer/inbox
-- does: the day is that of a UUIDv7, and a transaction that has a note may be idle for a minute, unless the session has
-- a limit of its own.
CREATE OR REPLACE FUNCTION inbox_once(consumer_group text, event_id uuid) RETURNS boolean LANGUAGE sql
BEGIN ATOMIC
    WITH bound AS (
        SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true)
        WHERE pg_catalog.current_setting('idle_in_transaction_session_timeout') = '0'::text
    ), noted AS (
        INSERT INTO inbox (day, consumer_group, event_id)
        SELECT '1970-01-01'::date + CASE WHEN $2::text LIKE '______________7%'::text
            THEN (('x'::text || pg_catalog.left($2::text, 8) || substring($2::text FROM 10 FOR 4))
                ::bit(48)::bigint / 86400000::bigint)::integer ELSE 0 END, $1, $2
        FROM (SELECT count(*) FROM bound) AS executed ON CONFLICT DO NOTHING RETURNING true
    )
    SELECT EXISTS (SELECT FROM noted);
END;
