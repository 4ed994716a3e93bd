SELECT id, stream, after_entry, until_ms, since, events, noticed_at FROM outbox_loss WHERE NOT told ORDER BY id
