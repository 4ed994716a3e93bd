SELECT pg_catalog.set_config('statement_timeout', $1, true), pg_catalog.set_config('lock_timeout', $2, true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', $3, true)
