-- Deletes the marks before those in $1, by part. None of these is 0.
DELETE FROM outbox_mark m USING pg_catalog.unnest($1::bigint[]) WITH ORDINALITY AS b(id, n)
WHERE m.id < b.id AND (m.part = b.n - 1 OR m.part = -1 AND b.n = 1 AND m.id < ALL ($1))
