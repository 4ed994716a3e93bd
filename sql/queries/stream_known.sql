SELECT stream FROM outbox_stream
UNION
SELECT $1::text || o.aggregate_type || coalesce('.'::text || (m.part % nullif((SELECT shards FROM relay_state), 1::smallint))::text, ''::text)
FROM outbox_settled m
CROSS JOIN LATERAL (
    SELECT r.aggregate_type FROM outbox r WHERE r.part = m.part AND r.xid = ANY (m.running)
    UNION ALL
    SELECT r.aggregate_type FROM outbox r WHERE r.part = m.part AND r.xid >= pg_catalog.pg_snapshot_xmax(m.settled)
) o
ORDER BY 1
