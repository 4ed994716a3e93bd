-- Tells whether the stream's gate was raised before. Somebody may note the stream at the same moment: then it was not.
WITH noted AS (
    INSERT INTO outbox_stream AS s (stream, adopted_epoch) VALUES ($1, $2)
    ON CONFLICT (stream) DO UPDATE SET adopted_epoch = greatest(s.adopted_epoch, excluded.adopted_epoch)
    WHERE s.adopted_epoch < excluded.adopted_epoch
    RETURNING gated
)
SELECT coalesce((SELECT gated FROM noted), (SELECT gated FROM outbox_stream WHERE stream = $1), false)
