SELECT id FROM outbox_backlog WHERE part = $1::smallint AND stream = $2
