DELETE FROM outbox_dead WHERE id = $1
