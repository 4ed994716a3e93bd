SELECT id, seq, aggregate_type, aggregate_id FROM outbox_dead ORDER BY seq LIMIT 100000
