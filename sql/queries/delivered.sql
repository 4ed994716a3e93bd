SELECT EXISTS (SELECT FROM outbox_settled WHERE hi > 0)
