UPDATE outbox_loss SET told = true, events = $2, first_at = $3, last_at = $4 WHERE id = $1
