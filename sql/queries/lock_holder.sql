-- The session that holds the leader's lock, if there is one; its application, role and address, as far as this role may
-- see them; and whether it is a relay's.
SELECT l.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, ''), coalesce(a.client_addr::text, ''),
    coalesce(a.application_name, '') LIKE 'posthaste locks%' OR a.usename IS NULL
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.mode = 'ExclusiveLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = pg_catalog.hashtextextended(
      'posthaste ' || $1::text || ' ' || 'outbox'::regclass::oid::text, 0)
