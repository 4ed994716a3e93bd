-- The session that holds the leader's lock, if there is one; its application, role and address, as far as this role may
-- see them; whether it is a relay's; and whether that relay does not reach the sink.
SELECT l.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, ''), coalesce(a.client_addr::text, ''),
    coalesce(a.application_name, '') LIKE 'posthaste locks%' OR a.usename IS NULL,
    coalesce(a.application_name, '') = 'posthaste locks without sink'
FROM outbox_leader l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
