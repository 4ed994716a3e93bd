-- The numbers of the first $3 unsettled rows of part $1 whose streams are not among $2, in order.
SELECT ARRAY(
    SELECT b.seq FROM outbox_backlog b WHERE b.part = $1::smallint AND b.stream <> ALL ($2::text[])
    ORDER BY b.seq LIMIT $3)
