-- What a role, a database or the server may have set otherwise, now or by a reload in the middle of the session: what a session
-- sets itself stays. A commit is on disk when it returns: Redis is told of it then, and would know of what Postgres has
-- forgotten after a crash. Text is UTF-8, whatever the database is written in (SQL_ASCII cannot be read as anything but
-- itself).
SELECT pg_catalog.set_config('synchronous_commit', CASE pg_catalog.current_setting('synchronous_commit') WHEN 'off' THEN 'local' ELSE pg_catalog.current_setting('synchronous_commit') END, false),
       CASE WHEN pg_catalog.current_setting('server_encoding') <> 'SQL_ASCII' THEN pg_catalog.set_config('client_encoding', 'UTF8', false) END
