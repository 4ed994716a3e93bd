-- What a role, a database or the server may have set otherwise. A commit is on disk when it returns: Redis is told of it then,
-- and would know of what Postgres has forgotten after a crash. Text is UTF-8, whatever the database is written in (SQL_ASCII
-- cannot be read as anything but itself).
SELECT CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'local', false) END,
       CASE WHEN current_setting('server_encoding') <> 'SQL_ASCII' THEN set_config('client_encoding', 'UTF8', false) END
