-- Whether this server's transactions continue where those of the rows and of the marks have ended, as after an upgrade
-- in place: no mark has one in progress, or yet to come, no row is of one that is yet to come, and no mark sees a row
-- that was written since.
SELECT NOT EXISTS (
    SELECT FROM outbox_settled m
    WHERE greatest(pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(m.pass))
          > pg_catalog.pg_snapshot_xmin(pg_current_snapshot())
       OR (SELECT o.xid FROM outbox_rows o WHERE o.part = m.part ORDER BY o.xid DESC LIMIT 1)
          >= pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
       OR EXISTS (SELECT FROM outbox_rows o
                  WHERE o.part = m.part AND o.seq > m.hi AND pg_catalog.pg_visible_in_snapshot(o.xid, m.settled)))
