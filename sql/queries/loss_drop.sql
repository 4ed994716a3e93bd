DELETE FROM outbox_loss WHERE id = $1
