-- For what is in a stream ($1) and not settled: when the newest marks were written, and the oldest row that is owed; the earlier of
-- both. Nothing that was published before is unknown.
SELECT least((SELECT pg_catalog.min(m.at) FROM outbox_mark m WHERE m.id IN (SELECT mark FROM outbox_settled)),
             (SELECT pg_catalog.min(b.created_at) FROM outbox_backlog b
              WHERE (SELECT prefix FROM relay_state) || b.aggregate_type || coalesce('.'::text || (b.part % nullif((SELECT shards FROM relay_state), 1::smallint))::text, ''::text) = $1
              AND pg_catalog.isfinite(b.created_at)))
