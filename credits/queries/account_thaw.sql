UPDATE credit_accounts SET frozen = NULL WHERE user_id = $1 AND frozen IS NOT NULL
