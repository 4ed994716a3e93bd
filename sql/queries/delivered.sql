-- A mark that has numbers below it, or what was delivered before there were marks.
SELECT EXISTS (SELECT FROM outbox_settled WHERE hi > 0) OR EXISTS (SELECT FROM outbox_history_old)
