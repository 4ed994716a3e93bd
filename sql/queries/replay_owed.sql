-- Whether rows are owed although the snapshot sees them.
SELECT EXISTS (SELECT FROM outbox_backlog WHERE pg_catalog.pg_visible_in_snapshot(xid, $1::pg_snapshot))
