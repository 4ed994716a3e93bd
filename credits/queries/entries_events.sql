INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
SELECT id, 'credits', subject, type, payload::jsonb FROM unnest($1::uuid[], $2::text[], $3::text[],
    $4::text[]) AS e(id, subject, type, payload)
ON CONFLICT DO NOTHING
