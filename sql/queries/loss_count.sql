-- What history has of a stream behind an id. What was published after the adoption that noted it is behind it, too: that was
-- settled later, and has an id that was given later (not where a server with a slower clock took over, hence either). Ids are
-- compared as numbers; their halves have up to 20 digits.
SELECT count(*), min(published_at), max(published_at) FROM outbox_history
WHERE published_at >= coalesce($2::timestamptz, '-infinity') AND stream = $1 AND entry_id IS NOT NULL
  AND (published_at < $3 OR split_part(entry_id, '-', 1)::numeric < $5::bigint)
  AND ($4::text = '' OR (split_part(entry_id, '-', 1)::numeric, split_part(entry_id, '-', 2)::numeric)
      > (split_part($4::text, '-', 1)::numeric, split_part($4::text, '-', 2)::numeric))
