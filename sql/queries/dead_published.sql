-- A retried event whose new row is gone, and which was not parked again (that would have cleared retry_seq), is published.
DELETE FROM outbox_dead d
WHERE d.retry_seq IS NOT NULL
  AND NOT EXISTS (SELECT 1 FROM outbox o
                  WHERE o.part = (pg_catalog.hashtextextended(d.aggregate_id, 0) & 15::bigint)::smallint AND o.seq = d.retry_seq AND o.id = d.id)
