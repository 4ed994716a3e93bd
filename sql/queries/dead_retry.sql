SELECT outbox_retry($1)
