SELECT a.user_id, a.balance, a.last_seq, coalesce(a.frozen, ''), a.updated_at, coalesce(s.total, 0),
    coalesce(s.entries, 0), coalesce(s.last_balance, 0),
    (SELECT count(*) FROM credit_quarantine q WHERE q.user_id = a.user_id)
FROM (SELECT * FROM credit_accounts WHERE user_id > $1 AND ($3::uuid[] IS NULL OR user_id = ANY ($3))
    ORDER BY user_id LIMIT $2) a
LEFT JOIN LATERAL (
    SELECT pg_catalog.sum(CASE WHEN outcome <> 'OK' THEN 0 WHEN kind = 'add' THEN amount
        ELSE -amount END)::bigint AS total, count(*) AS entries,
        (pg_catalog.array_agg(balance_after ORDER BY seq DESC))[1] AS last_balance
    FROM credit_entries WHERE user_id = a.user_id
) s ON true
ORDER BY a.user_id
