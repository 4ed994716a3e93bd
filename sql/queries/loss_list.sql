SELECT stream, coalesce(events, -1), first_at, last_at, noticed_at FROM outbox_loss
WHERE told AND replayed_at IS NULL ORDER BY noticed_at, stream
