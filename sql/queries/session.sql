-- Sets what a role, a database or the server may have set otherwise, now or by a reload during the session: a setting
-- made by the session stays. A commit is on disk when it returns: Redis is written to then, and must not have what a
-- crash of Postgres loses. Text is UTF-8, whatever the database's encoding is (SQL_ASCII can only be read as itself).
SELECT pg_catalog.set_config('synchronous_commit', CASE pg_catalog.current_setting('synchronous_commit')
        WHEN 'off' THEN 'local' ELSE pg_catalog.current_setting('synchronous_commit') END, false),
    CASE WHEN pg_catalog.current_setting('server_encoding') <> 'SQL_ASCII'
        THEN pg_catalog.set_config('client_encoding', 'UTF8', false) END,
    -- From Postgres 17 on.
    CASE WHEN pg_catalog.current_setting('transaction_timeout', true) <> '0'
        THEN pg_catalog.set_config('transaction_timeout', '0', false) END
