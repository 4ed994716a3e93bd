-- What is settled becomes that of a transaction that has ended on every server.
UPDATE outbox o SET xid = '3' FROM outbox_settled m
WHERE m.part = o.part AND (
    o.seq <= m.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, m.settled)
    OR o.seq <= m.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, m.pass)
    OR EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq))
