SELECT pg_catalog.max(done_at) FROM outbox_reconcile
