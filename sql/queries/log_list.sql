-- The rows that marks have settled: for each mark and part ($1, $2) the rows that the mark settles and the one before
-- it, of the same part, does not; in this order, and by number. Of the first mark only those after the number $3. Only
-- those of an aggregate, a type and a stream ('': any; $8: or all streams of the type that it names), at most $7.
--
-- There are three ways to the rows. Within a pass they are between two cursors. Otherwise they are found by their
-- transactions, which the mark before did not see: those that were running then, and those that began later. Rows that
-- were settled on another server, from which this table was restored, are found by their number. The rows of a mark
-- and part are sorted by themselves, and the whole is in the order of $1: so it ends as soon as there are $7.
SELECT u.n, r.seq, r.id
FROM unnest($1::bigint[], $2::smallint[]) WITH ORDINALITY AS u(mark, part, n)
CROSS JOIN LATERAL (SELECT * FROM outbox_mark WHERE id = u.mark LIMIT 1) k
LEFT JOIN LATERAL outbox_mark_until(u.part, u.mark - 1::bigint) b ON true
CROSS JOIN LATERAL (
    SELECT coalesce(pg_catalog.pg_snapshot_xmax(b.settled), '3') AS since,
        ARRAY(SELECT pg_catalog.pg_snapshot_xip(b.settled)) AS running,
        greatest(pg_catalog.pg_snapshot_xmax(k.settled), pg_catalog.pg_snapshot_xmax(k.pass)) AS until,
        coalesce(b.pass::text IN (k.pass::text, k.settled::text), false) AS paged
) t
CROSS JOIN LATERAL (
    SELECT o.seq, o.id
    FROM (
        SELECT * FROM outbox_live
        WHERE t.paged AND part = u.part AND seq > b.cursor AND seq <= greatest(k.hi, k.cursor)
        UNION ALL
        SELECT * FROM outbox_live WHERE NOT t.paged AND part = u.part AND xid = ANY (t.running)
        UNION ALL
        SELECT * FROM outbox_live WHERE NOT t.paged AND part = u.part AND xid >= t.since AND xid < t.until
        UNION ALL
        SELECT * FROM outbox_live
        WHERE NOT t.paged AND t.since > '3' AND part = u.part AND seq > b.hi AND seq <= greatest(k.hi, k.cursor)
          AND xid = '3' AND EXISTS (SELECT FROM outbox_rows WHERE part = u.part AND xid = '3')
    ) o
    WHERE outbox_holds(k.settled, k.hi, k.pass, k.cursor, o.xid, o.seq)
      AND NOT outbox_holds(b.settled, b.hi, b.pass, b.cursor, o.xid, o.seq)
      AND (u.n > 1 OR o.seq > $3)
      AND ($4::text IS NULL OR o.aggregate_id = $4) AND ($5 = '' OR o.event_type::text = $5)
      AND ($6 = '' OR outbox_stream_name(k.prefix, o.aggregate_type, o.part, k.shards) = $6
           OR $8::boolean AND k.prefix || o.aggregate_type = $6)
    ORDER BY o.seq LIMIT $7
) r
ORDER BY u.n, r.seq LIMIT $7
