-- The subscriptions that write marks of another database into this one.
SELECT s.subname::text FROM pg_subscription s JOIN pg_subscription_rel r ON r.srsubid = s.oid
WHERE r.srrelid = 'outbox_mark'::regclass::oid ORDER BY 1
