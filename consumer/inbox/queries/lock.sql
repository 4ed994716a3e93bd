SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('posthaste inbox',
    pg_catalog.to_regclass('inbox')::oid::bigint))
