SELECT pg_catalog.pg_try_advisory_lock_shared($1::bigint)
