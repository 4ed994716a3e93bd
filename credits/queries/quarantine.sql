INSERT INTO credit_quarantine (bucket, stream_id, user_id, reason, entry)
SELECT b, i, u, r, e::jsonb FROM unnest($1::smallint[], $2::text[], $3::uuid[], $4::text[], $5::text[]) AS n(b, i, u,
    r, e)
ON CONFLICT DO NOTHING
