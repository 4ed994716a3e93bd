DELETE FROM inbox_default WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM inbox_default WHERE seen_at < clock_timestamp() - $1::interval ORDER BY seen_at LIMIT 5000))
