SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'credit_accounts'::regclass::oid
