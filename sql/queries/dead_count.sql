SELECT count(*) FROM outbox_dead
