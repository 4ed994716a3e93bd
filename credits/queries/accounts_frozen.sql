SELECT user_id, balance, last_seq, frozen, updated_at FROM credit_accounts WHERE frozen IS NOT NULL ORDER BY user_id
