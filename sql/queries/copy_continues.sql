-- Whether this server's transactions continue where those of the rows and of the marks have ended, as after an upgrade
-- in place: no mark has one in progress, or yet to come, no row is of one that is yet to come, and no mark sees a row
-- that was written since. A copy on the same server has the marks and rows of this one's own transactions: one that
-- is in progress is in progress for the marks, too.
SELECT NOT EXISTS (
    SELECT FROM outbox_settled m
    WHERE greatest(pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(m.pass))
          > CASE WHEN p.system_identifier = r.system_identifier THEN pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
            ELSE pg_catalog.pg_snapshot_xmin(pg_current_snapshot()) END
       OR (SELECT o.xid FROM outbox_rows o WHERE o.part = m.part ORDER BY o.xid DESC LIMIT 1)
          >= pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
       OR EXISTS (SELECT FROM outbox_rows o
                  WHERE o.part = m.part AND o.seq > m.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, m.settled)))
FROM relay_state r, outbox_place p
