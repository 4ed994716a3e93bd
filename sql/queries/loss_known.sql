-- How many events of a stream earlier losses have counted in a range, and no replay has published again.
SELECT coalesce(pg_catalog.sum(events), 0)::bigint FROM outbox_loss
WHERE id < $1 AND stream = $2 AND told AND replayed_at IS NULL AND events > 0 AND first_at >= $3 AND last_at <= $4
