-- Keyed by the table, so that two schemas in one database do not meet.
SELECT hashtextextended('posthaste ' || $1::text || ' ' || 'outbox'::regclass::oid, 0)
