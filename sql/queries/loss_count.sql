-- What history has of a stream behind an id. What was published after the adoption that noted it is behind it, too: that was
-- settled later, and has an id that was given later (not where a server with a slower clock took over, hence either). What an
-- earlier loss of the stream has counted, and nobody has brought back, is lost once. Ids are compared as numbers; their halves
-- have up to 20 digits.
SELECT count(*), pg_catalog.min(published_at), pg_catalog.max(published_at) FROM outbox_history h
WHERE published_at >= coalesce($2::timestamptz, '-infinity') AND stream = $1 AND entry_id IS NOT NULL
  AND (published_at < $3 OR pg_catalog.split_part(entry_id, '-', 1)::numeric < $5::bigint::numeric)
  AND ($4::text = '' OR (pg_catalog.split_part(entry_id, '-', 1)::numeric, pg_catalog.split_part(entry_id, '-', 2)::numeric)
      > (pg_catalog.split_part($4::text, '-', 1)::numeric, pg_catalog.split_part($4::text, '-', 2)::numeric))
  AND NOT EXISTS (
    SELECT FROM outbox_loss e
    WHERE e.id < $6 AND e.stream = $1 AND e.replayed_at IS NULL
      AND h.published_at >= coalesce(e.since, '-infinity')
      AND (h.published_at < e.noticed_at OR pg_catalog.split_part(h.entry_id, '-', 1)::numeric < e.until_ms::numeric)
      AND (e.after_entry = '' OR (pg_catalog.split_part(h.entry_id, '-', 1)::numeric, pg_catalog.split_part(h.entry_id, '-', 2)::numeric)
          > (pg_catalog.split_part(nullif(e.after_entry, ''), '-', 1)::numeric, pg_catalog.split_part(nullif(e.after_entry, ''), '-', 2)::numeric)))
