INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, published_at, stream, entry_id, mode)
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload::jsonb, headers::jsonb, created_at, clock_timestamp(), stream, nullif(entry_id, ''), 'poll'
FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::timestamptz[], $9::text[], $10::text[])
    AS e(seq, id, aggregate_type, aggregate_id, event_type, payload, headers, created_at, stream, entry_id)
