SELECT user_id, frozen FROM credit_accounts WHERE frozen IS NOT NULL ORDER BY user_id
