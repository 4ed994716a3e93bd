-- Locks all parts for this transaction, in their order: the holder of a part's lock may write its mark.
SELECT pg_catalog.count(pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(
    'posthaste part ' || p::text || ' ' || 'outbox'::regclass::oid::text, 0)))
FROM pg_catalog.set_config('lock_timeout', '4s', true), pg_catalog.generate_series(0, 15) AS p
