-- The database's clock, which the marks are from: a relay whose own is ahead would delete what is young. What changes when the
-- table is truncated. The oldest transaction under way, and the next one.
SELECT clock_timestamp(), pg_catalog.pg_relation_filenode('outbox')::bigint, pg_catalog.pg_snapshot_xmin(s), pg_catalog.pg_snapshot_xmax(s) FROM pg_current_snapshot() s
