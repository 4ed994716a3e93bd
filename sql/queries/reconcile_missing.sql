-- The missing events, and the phantoms that no operator has acknowledged.
SELECT coalesce(pg_catalog.sum(missing) FILTER (WHERE missing > 0), 0)::bigint,
    (SELECT count(*) FROM outbox_phantom WHERE acked_at IS NULL)
FROM outbox_reconcile WHERE told AND replayed_at IS NULL
