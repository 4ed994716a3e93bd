-- Whether rows that the snapshot sees are unsettled.
SELECT EXISTS (SELECT FROM outbox_backlog WHERE pg_catalog.pg_visible_in_snapshot(xid, $1::pg_snapshot))
