SELECT coalesce(pg_catalog.sum(events) FILTER (WHERE events > 0), 0)::bigint FROM outbox_loss
WHERE told AND replayed_at IS NULL
