SELECT id, user_id, idem_key, idem_fp, fence, amount, currency, status, coalesce(resp_status, 0), resp_body,
    created_at, coalesce(pay_with, ''), pg_catalog.pg_postmaster_start_time()
FROM orders WHERE user_id = $1 AND idem_key = $2
