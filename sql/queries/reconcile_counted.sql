-- Reports that $2 settled events of a note ($1) are missing, -1 if the number is unknown, settled from $3 to $4. Events
-- that an earlier note has counted in this range, and no replay has published again, are missing only once. Returns the
-- number.
UPDATE outbox_reconcile r SET told = true, first_at = $3, last_at = $4,
    missing = CASE WHEN $2 < 0 THEN $2 ELSE greatest($2 - (
        SELECT coalesce(pg_catalog.sum(e.missing), 0)::bigint FROM outbox_reconcile e
        WHERE e.id < r.id AND e.stream = r.stream AND e.told AND e.replayed_at IS NULL AND e.missing > 0
          AND e.first_at >= $3 AND e.last_at <= $4), 0) END
WHERE id = $1 RETURNING missing
