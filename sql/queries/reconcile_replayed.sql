-- Everything settled from $1 to $2 was published again, of stream $3, or of all.
UPDATE outbox_reconcile SET replayed_at = clock_timestamp()
WHERE told AND replayed_at IS NULL AND stream <> '' AND first_at >= $1 AND last_at <= $2
  AND ($3::text = '' OR stream = $3)
