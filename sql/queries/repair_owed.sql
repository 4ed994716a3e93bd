SELECT b.id FROM outbox_backlog b WHERE b.part = $1::smallint
  AND (SELECT prefix FROM relay_state) || b.aggregate_type || coalesce('.'::text || (b.part % nullif((SELECT shards FROM relay_state), 1::smallint))::text, ''::text) = $2
