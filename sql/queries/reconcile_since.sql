-- For unsettled entries of a stream ($1): when the newest marks were written, or the oldest unsettled row was created,
-- or $2, whichever is earliest: everything published before that is known. And the last mark that was written $3
-- before that, 0 if none was.
SELECT k.at, coalesce((
    SELECT id FROM outbox_mark WHERE settled IS NOT NULL AND at < k.at - $3::interval ORDER BY id DESC LIMIT 1), 0)
FROM (SELECT least($2::timestamptz,
    (SELECT pg_catalog.min(m.at) FROM outbox_mark m WHERE m.id IN (SELECT mark FROM outbox_settled)),
    (SELECT pg_catalog.min(created_at) FROM outbox_backlog
     WHERE stream = $1 AND pg_catalog.isfinite(created_at))) AS at) k
