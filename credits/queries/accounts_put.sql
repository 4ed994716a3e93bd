INSERT INTO credit_accounts AS a (user_id, balance, last_seq, frozen, updated_at)
SELECT u, b, q, nullif(f, ''), t FROM unnest($1::uuid[], $2::bigint[], $3::bigint[], $4::text[],
    $5::timestamptz[]) AS n(u, b, q, f, t)
ON CONFLICT (user_id) DO UPDATE SET balance = excluded.balance, last_seq = excluded.last_seq,
    frozen = excluded.frozen, updated_at = excluded.updated_at
WHERE a.last_seq <= excluded.last_seq
