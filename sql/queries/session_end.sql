SELECT pg_catalog.pg_terminate_backend($1::integer)
