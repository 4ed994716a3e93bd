-- Keyed by the table: advisory locks are the database's, and another application may use the same numbers.
SELECT pg_catalog.hashtextextended('posthaste ' || $1::text || ' ' || 'outbox'::regclass::oid::text, 0)
