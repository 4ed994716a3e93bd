-- The source that identifies this database in Redis; '' if this is a copy for which no relay has set a new source.
SELECT coalesce(CASE WHEN outbox_copied(r) THEN NULL ELSE r.source::text END, '') FROM relay_state r
