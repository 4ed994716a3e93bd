-- What history does not have any more cannot be brought back.
DELETE FROM outbox_loss WHERE told AND noticed_at < clock_timestamp() - greatest($1::interval, interval '72 hours')
