SELECT id FROM outbox_dead WHERE retry_seq IS NULL ORDER BY seq
