-- The database's clock, which the marks are from: a relay whose own clock is ahead would delete young rows. The
-- table's file, which changes when it is truncated. The oldest transaction under way, the next one, and all that are
-- under way.
SELECT clock_timestamp(), pg_catalog.pg_relation_filenode('outbox')::bigint, pg_catalog.pg_snapshot_xmin(s),
    pg_catalog.pg_snapshot_xmax(s), ARRAY(SELECT x::text::bigint FROM pg_catalog.pg_snapshot_xip(s) x)
FROM pg_current_snapshot() s
