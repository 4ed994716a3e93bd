-- The query is one statement, so that the account has exactly the operations up to the mark.
SELECT e.epoch, e.mark, a.balance, a.last_seq, a.frozen, a.updated_at
FROM credit_epoch e LEFT JOIN credit_accounts a ON a.user_id = $2 WHERE e.bucket = $1
