-- The marks that may have settled what a stream ($1) has lost after an id ($2): from the first that has a higher
-- entry, and is not older than $3, to the last before the adoption ($4) that noted it. The owner before it settled
-- nothing in between: an adoption waits for its marks. And when the first and the last of them were written, NULL if
-- there is none.
SELECT coalesce(pg_catalog.min(id) - 1, 0), coalesce(pg_catalog.max(id), 0), pg_catalog.min(at), pg_catalog.max(at)
FROM outbox_mark
WHERE settled IS NOT NULL AND at <= $4 AND id >= (
    SELECT id FROM outbox_mark
    WHERE settled IS NOT NULL AND at >= coalesce($3::timestamptz, '-infinity') AND entries ->> $1::text IS NOT NULL
      AND ($2::text = '' OR (pg_catalog.split_part(entries ->> $1, '-', 1)::numeric,
          pg_catalog.split_part(entries ->> $1, '-', 2)::numeric)
          > (pg_catalog.split_part(nullif($2, ''), '-', 1)::numeric,
          pg_catalog.split_part(nullif($2, ''), '-', 2)::numeric))
    ORDER BY id LIMIT 1)
