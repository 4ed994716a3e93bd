SELECT user_id, balance, last_seq, coalesce(frozen, ''), updated_at FROM credit_accounts
    WHERE user_id = ANY ($1::uuid[]) ORDER BY user_id FOR UPDATE
