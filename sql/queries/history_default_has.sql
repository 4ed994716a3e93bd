SELECT EXISTS (SELECT 1 FROM outbox_history_default WHERE published_at >= $1 AND published_at < $2)
