DELETE FROM outbox_history_default WHERE published_at < $1
