-- What is settled in part $1 becomes that of a transaction that has ended on every server: at least $3 rows, if there are as many,
-- of the transactions behind $2. Not what was written here (its transaction is the row's own): it may have a number and a
-- transaction that the mark of the other server holds. Returns the last of the transactions, NULL if there is none.
WITH page AS MATERIALIZED (
    SELECT p.xid AS last FROM (SELECT o.xid FROM outbox o WHERE o.part = $1::smallint AND o.xid > $2::xid8 ORDER BY o.xid LIMIT $3) p
    ORDER BY p.xid DESC LIMIT 1
), done AS (
    UPDATE outbox o SET xid = '3' FROM outbox_settled m, page
    WHERE m.part = $1::smallint AND o.part = $1::smallint AND o.xid > $2::xid8 AND o.xid <= page.last AND o.xid::xid <> o.xmin AND (
        o.seq <= m.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, m.settled)
        OR o.seq <= m.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, m.pass)
        OR EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq))
)
SELECT (SELECT last::text FROM page)
