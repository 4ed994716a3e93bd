-- For unsettled entries of a stream ($1): when the newest marks were written, or the oldest unsettled row was created,
-- if that is earlier. Everything published before that is known.
SELECT least((SELECT pg_catalog.min(m.at) FROM outbox_mark m WHERE m.id IN (SELECT mark FROM outbox_settled)),
    (SELECT pg_catalog.min(created_at) FROM outbox_backlog WHERE stream = $1 AND pg_catalog.isfinite(created_at)))
