-- The transactions, older than $1, for whose locks a session of posthaste waits, directly or through other waiting
-- sessions, or which let no session read posthaste's tables; the statement that ends each; and whether it delays only
-- the creation of a slot, which waits for every transaction of the server. Process 0 stands for all prepared
-- transactions: of these, the query returns those with a lock that a session awaits, or that excludes readers.
WITH RECURSIVE blocking(pid, slot) AS (
    SELECT coalesce(l.pid, 0), false FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
    WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.mode = 'AccessExclusiveLock' AND c.relnamespace = pg_catalog.current_schema()::regnamespace::oid
      AND c.relname::text ~ '^(outbox|relay_state|posthaste_)'
    UNION
    SELECT b, coalesce(a.query LIKE '%pg_create_logical_replication_slot(%', false)
    FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid, pg_catalog.pg_blocking_pids(l.pid) AS p(pids),
        pg_catalog.unnest(pids) AS b
    WHERE NOT l.granted AND a.datname = current_database() AND a.application_name LIKE 'posthaste %'
    UNION
    SELECT b, slot FROM blocking, pg_catalog.unnest(pg_catalog.pg_blocking_pids(pid)) AS b
)
SELECT pg_catalog.format('process %s (%s)', a.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''),
        a.usename, a.state, 'since '::text || pg_catalog.date_trunc('second', a.xact_start)::text)),
    pg_catalog.format('SELECT pg_terminate_backend(%s)', a.pid),
    NOT EXISTS (SELECT FROM blocking b WHERE b.pid = a.pid AND NOT b.slot)
FROM pg_stat_activity a
WHERE a.pid IN (SELECT pid FROM blocking) AND pg_catalog.cardinality(pg_catalog.pg_blocking_pids(a.pid)) = 0
  AND coalesce(a.xact_start < clock_timestamp() - $1::interval, true)
UNION ALL
SELECT pg_catalog.format('the prepared transaction %L (%s, since %s)', p.gid, p.owner,
        pg_catalog.date_trunc('second', p.prepared)),
    pg_catalog.format('COMMIT PREPARED %1$L, or ROLLBACK PREPARED %1$L', p.gid),
    NOT EXISTS (SELECT FROM blocking b WHERE b.pid = 0 AND NOT b.slot)
FROM pg_prepared_xacts p
WHERE 0 IN (SELECT pid FROM blocking) AND p.database = current_database()
  AND p.prepared < clock_timestamp() - $1::interval
  AND EXISTS (SELECT FROM pg_locks x JOIN pg_locks h USING (virtualtransaction) LEFT JOIN pg_locks w
          ON NOT w.granted AND (w.relation = h.relation OR w.transactionid = h.transactionid)
      WHERE x.transactionid = p.transaction AND x.granted AND (w.pid IS NOT NULL OR h.mode = 'AccessExclusiveLock'))
