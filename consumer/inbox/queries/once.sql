INSERT INTO inbox (day, consumer_group, event_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
