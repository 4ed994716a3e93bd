-- What was delivered of a stream behind an id, before there were marks. What was published after the adoption that noted it is
-- behind it, too: that was settled later, and has an id that was given later (not where a server with a slower clock took over,
-- hence either). Ids are compared as numbers; their halves have up to 20 digits.
SELECT count(*), pg_catalog.min(published_at), pg_catalog.max(published_at) FROM outbox_history_old h
WHERE published_at >= coalesce($2::timestamptz, '-infinity') AND stream = $1 AND entry_id IS NOT NULL
  AND (published_at < $3 OR pg_catalog.split_part(entry_id, '-', 1)::numeric < $5::bigint::numeric)
  AND ($4::text = '' OR (pg_catalog.split_part(entry_id, '-', 1)::numeric, pg_catalog.split_part(entry_id, '-', 2)::numeric)
      > (pg_catalog.split_part($4::text, '-', 1)::numeric, pg_catalog.split_part($4::text, '-', 2)::numeric))
