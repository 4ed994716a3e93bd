SELECT coalesce(pg_catalog.sum(missing) FILTER (WHERE missing > 0), 0)::bigint FROM outbox_reconcile
WHERE told AND replayed_at IS NULL
