-- The query is one statement, so that the account has exactly the operations up to the mark.
SELECT e.epoch, e.mark, e.bumped_at, a.user_id IS NOT NULL, coalesce(a.balance, 0), coalesce(a.last_seq, 0),
    coalesce(a.frozen, ''), coalesce(a.updated_at, 'epoch')
FROM credit_epoch e LEFT JOIN credit_accounts a ON a.user_id = $2 WHERE e.bucket = $1
