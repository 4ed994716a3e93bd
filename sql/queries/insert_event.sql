INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
VALUES ($1, $2, $3, $4, $5::text::jsonb, $6::text::jsonb)
