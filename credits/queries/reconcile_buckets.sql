-- The query is one statement, so that counter-accounts and accounts come from one snapshot.
SELECT e.bucket, e.issued, coalesce(s.total, 0)::bigint, 'counter_account'
FROM credit_epoch e
LEFT JOIN (SELECT pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.uuid_send(user_id)), 0) AS bucket,
    pg_catalog.sum(balance) AS total FROM credit_accounts GROUP BY 1) s USING (bucket)
WHERE e.issued <> coalesce(s.total, 0)::bigint
ORDER BY e.bucket
