-- Makes the settings in $1, an object, and returns them: for the session, or, if a pooler is in between, for this
-- transaction only. The client of a pooler ($2) does not have the process id of the server's process.
--
-- A setting made by the session stays, whatever a role, a database or the server sets otherwise, now or by a reload
-- during the session. A commit is on disk when it returns: Redis is written to then, and must not have what a crash of
-- Postgres loses. Text is UTF-8, whatever the database's encoding is (SQL_ASCII can only be read as itself).
SELECT s.name, pg_catalog.set_config(s.name, s.value, p.pooled), p.pooled
FROM (SELECT pg_catalog.pg_backend_pid()::bigint <> $2::bigint AS pooled) AS p, (
    SELECT key AS name, value FROM pg_catalog.jsonb_each_text($1::jsonb)
    UNION ALL SELECT 'synchronous_commit', CASE pg_catalog.current_setting('synchronous_commit')
        WHEN 'off' THEN 'local' ELSE pg_catalog.current_setting('synchronous_commit') END
    UNION ALL SELECT 'client_encoding', 'UTF8' WHERE pg_catalog.current_setting('server_encoding') <> 'SQL_ASCII'
    -- From Postgres 17 on.
    UNION ALL SELECT 'transaction_timeout', '0' WHERE pg_catalog.current_setting('transaction_timeout', true) <> '0'
) AS s
