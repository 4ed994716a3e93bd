-- Deletes a dropped event with its row; and an event that was retried, once the new row is settled or gone and the
-- event is not dead again (that would have cleared retry_seq): it is published. A row is identified by its number and
-- its id: numbers are used again after a TRUNCATE ... RESTART IDENTITY.
WITH gone AS (
    DELETE FROM outbox_dead d
    WHERE d.dropped_at IS NOT NULL OR d.retry_seq IS NOT NULL
      AND NOT EXISTS (
        SELECT FROM outbox_rows o JOIN outbox_settled m ON m.part = o.part
        WHERE o.id = d.id AND o.seq = d.retry_seq AND NOT outbox_holds(m.settled, m.hi, m.pass, m.cursor, o.xid, o.seq))
    RETURNING d.id, d.row_seq
)
DELETE FROM outbox o USING gone g WHERE o.id = g.id AND o.seq = g.row_seq
