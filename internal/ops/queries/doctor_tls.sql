-- Whether this connection is encrypted, as the server sees it.
SELECT ssl FROM pg_stat_ssl WHERE pid = pg_catalog.pg_backend_pid()
