-- Gives settled rows of part $1 a transaction that has ended on every server: at least $3 rows, if there are as many,
-- of the transactions after $2. Rows that were written here are left: they may have a number and a transaction that the
-- mark of the other server settles. Their transaction is younger than the one that copied the newest mark, and no
-- younger than the one that wrote the row last, which may be a subtransaction or an update. Rows that the marks settle
-- were copied before the marks. Returns the last of the transactions, NULL without one.
WITH page AS MATERIALIZED (
    SELECT p.xid AS last FROM (
        SELECT o.xid FROM outbox_rows o WHERE o.part = $1::smallint AND o.xid > $2::xid8 ORDER BY o.xid LIMIT $3) p
    ORDER BY p.xid DESC LIMIT 1
), copied AS MATERIALIZED (
    SELECT t.now, t.now - pg_catalog.age(m.xmin) AS at
    FROM (SELECT pg_current_xact_id()::text::bigint AS now) t, (SELECT xmin FROM outbox_mark ORDER BY id DESC LIMIT 1) m
), done AS (
    UPDATE outbox o SET xid = '3' FROM outbox_settled m, page, copied c
    WHERE m.part = $1::smallint AND outbox_part(o.aggregate_id) = $1::smallint
      AND o.xid::xid8 > $2::xid8 AND o.xid::xid8 <= page.last
      AND (o.xid::text::numeric <= c.at::numeric
        OR o.xid::text::numeric > (c.now - pg_catalog.age(o.xmin))::numeric)
      AND (outbox_holds(m.settled, m.hi, m.pass, m.cursor, o.xid::xid8, o.seq)
        OR EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq))
)
SELECT (SELECT last::text FROM page)
