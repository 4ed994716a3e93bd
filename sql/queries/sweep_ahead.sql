-- The numbers of the first $3 unsettled rows of part $1 whose streams are not among $2, in order; only of those that $4
-- sees, unless it is NULL.
SELECT ARRAY(
    SELECT b.seq FROM outbox_backlog b WHERE b.part = $1::smallint AND b.stream <> ALL ($2::text[])
      AND ($4::pg_snapshot IS NULL OR pg_catalog.pg_visible_in_snapshot(b.xid, $4::pg_snapshot))
    ORDER BY b.seq LIMIT $3)
