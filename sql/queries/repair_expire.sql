-- Reports that are older than history.
WITH old AS (
    DELETE FROM outbox_phantom WHERE noticed_at < clock_timestamp() - greatest($1::interval, interval '30 days')
)
DELETE FROM outbox_repair WHERE done_at < clock_timestamp() - greatest($1::interval, interval '72 hours')
