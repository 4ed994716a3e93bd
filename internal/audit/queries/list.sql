-- The newest attempts since $1, at most $2: each by its outcome or, without one, by its beginning.
SELECT a.at, a.attempt, a.outcome, a.reason, a.action, a.actor, a.source, a.detail, a.role
FROM posthaste_audit a
WHERE a.at >= $1::timestamptz
  AND (a.outcome <> 'begun' OR NOT EXISTS (SELECT FROM posthaste_audit o WHERE o.attempt = a.attempt
      AND o.outcome <> 'begun'))
ORDER BY a.id DESC
LIMIT $2::bigint
