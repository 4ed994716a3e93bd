INSERT INTO outbox_stream AS s (stream, adopted_epoch) VALUES ($1, $2)
ON CONFLICT (stream) DO UPDATE SET adopted_epoch = greatest(s.adopted_epoch, excluded.adopted_epoch)
WHERE s.adopted_epoch < excluded.adopted_epoch
