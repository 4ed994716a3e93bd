-- Events that history does not contain any more cannot be restored.
DELETE FROM outbox_loss WHERE told AND noticed_at < clock_timestamp() - greatest($1::interval, interval '72 hours')
