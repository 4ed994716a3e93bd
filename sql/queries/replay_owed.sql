-- How many parts have rows that are owed although the snapshot sees them.
SELECT pg_catalog.count(DISTINCT part) FROM outbox_backlog WHERE pg_catalog.pg_visible_in_snapshot(xid, $1::pg_snapshot)
