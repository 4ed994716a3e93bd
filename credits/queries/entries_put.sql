INSERT INTO credit_entries (user_id, seq, op_id, fp, kind, outcome, amount, balance_after, reference, durability,
    epoch, stream_id, created_at)
SELECT * FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::bytea[], $5::text[], $6::text[], $7::bigint[],
    $8::bigint[], $9::text[], $10::text[],
    $11::bigint[], $12::text[], $13::timestamptz[])
ON CONFLICT DO NOTHING
