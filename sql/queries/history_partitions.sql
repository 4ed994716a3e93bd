-- The database's clock, because it is what published_at is from: a relay whose own is ahead would drop what is young.
SELECT clock_timestamp(), coalesce(pg_catalog.array_agg(c.relname::text), '{}')
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_history'::regclass::oid
