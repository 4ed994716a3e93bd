-- What marks have settled: for each mark and part ($1, $2) the rows that the mark holds and the one before it, of the same part,
-- does not; in this order, and by number. Of the first mark only what is behind the number $3, of all an aggregate, a type and a
-- stream ('': any; $8: or of all streams of the type that it names), at most $7. There are three ways to the rows. Within a pass they are between two cursors. Otherwise they
-- are found by their transactions, which the mark before did not see: what was under way then, and what began later. And what was
-- settled on another server, from which this table was restored, has a transaction id that says nothing: it goes by the number.
-- A row's stream is that of the layout it was published under. The rows of a mark and part are sorted by themselves, and the whole is in the order of $1: so it ends as soon as there are $7.
SELECT u.n, r.seq, r.id
FROM unnest($1::bigint[], $2::smallint[]) WITH ORDINALITY AS u(mark, part, n)
CROSS JOIN LATERAL (SELECT * FROM outbox_mark WHERE id = u.mark LIMIT 1) k
LEFT JOIN LATERAL (
    SELECT * FROM (
        (SELECT * FROM outbox_mark WHERE part >= u.part AND (part, id) < (u.part, u.mark::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark WHERE part >= -1 AND (part, id) < ((-1)::smallint, u.mark::bigint) AND settled IS NOT NULL ORDER BY part DESC, id DESC LIMIT 1)
    ) n ORDER BY id DESC LIMIT 1
) b ON true
CROSS JOIN LATERAL (
    SELECT coalesce(pg_catalog.pg_snapshot_xmax(b.settled), '3') AS since, ARRAY(SELECT pg_catalog.pg_snapshot_xip(b.settled)) AS running,
           greatest(pg_catalog.pg_snapshot_xmax(k.settled), pg_catalog.pg_snapshot_xmax(k.pass)) AS until,
           coalesce(b.pass::text IN (k.pass::text, k.settled::text), false) AS paged
) t
CROSS JOIN LATERAL (
    SELECT o.seq, o.id
    FROM (
        SELECT * FROM outbox
        WHERE t.paged AND part = u.part AND seq > b.cursor AND seq <= greatest(k.hi, k.cursor)
        UNION ALL
        SELECT * FROM outbox WHERE NOT t.paged AND part = u.part AND xid = ANY (t.running)
        UNION ALL
        SELECT * FROM outbox WHERE NOT t.paged AND part = u.part AND xid >= t.since AND xid < t.until
        UNION ALL
        SELECT * FROM outbox
        WHERE NOT t.paged AND t.since > '3' AND part = u.part AND seq > b.hi AND seq <= greatest(k.hi, k.cursor) AND xid = '3'
          AND EXISTS (SELECT FROM outbox WHERE part = u.part AND xid = '3')
    ) o
    WHERE ((o.seq <= k.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, k.settled)) OR (o.seq <= k.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, k.pass)))
      AND ((o.seq <= b.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, b.settled)) OR (o.seq <= b.cursor AND pg_catalog.pg_visible_in_snapshot(o.xid, b.pass))) IS NOT TRUE
      AND (u.n > 1 OR o.seq > $3)
      AND ($4::text IS NULL OR o.aggregate_id = $4) AND ($5 = '' OR o.event_type::text = $5)
      AND ($6 = '' OR (SELECT prefix FROM relay_state) || o.aggregate_type || coalesce('.'::text || (o.part % nullif(coalesce(
          (SELECT l.shards FROM outbox_layout l WHERE o.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, l.settled) ORDER BY l.id LIMIT 1),
          (SELECT shards FROM relay_state)), 1::smallint))::text, ''::text) = $6
           OR $8::boolean AND (SELECT prefix FROM relay_state) || o.aggregate_type = $6)
      AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq)
    ORDER BY o.seq LIMIT $7
) r
ORDER BY u.n, r.seq LIMIT $7
