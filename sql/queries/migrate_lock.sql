SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('posthaste migrate ' || $1::text, 0))
