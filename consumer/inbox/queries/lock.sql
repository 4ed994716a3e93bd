SELECT pg_try_advisory_xact_lock(hashtextextended('posthaste inbox', to_regclass('inbox')::oid::bigint))
