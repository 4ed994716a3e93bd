-- The rows of an event in some blocks of the log, which has no index for it.
SELECT part, seq FROM outbox
WHERE ctid >= pg_catalog.format('(%s,0)', $2::bigint)::tid AND ctid < pg_catalog.format('(%s,0)', $3::bigint)::tid
  AND id = $1
