SELECT id FROM outbox_backlog WHERE part = $1::smallint AND (SELECT prefix FROM relay_state) || aggregate_type = $2
