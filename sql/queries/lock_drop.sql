SELECT pg_catalog.pg_advisory_unlock($1::bigint)
