-- The row that was parked goes with it: without this it would be owed. That of a retry stays.
WITH gone AS (
    DELETE FROM outbox o USING outbox_dead d
    WHERE d.id = $1 AND o.part = (pg_catalog.hashtextextended(d.aggregate_id, 0) & 15::bigint)::smallint AND o.seq = d.row_seq AND o.id = d.id
)
DELETE FROM outbox_dead WHERE id = $1
