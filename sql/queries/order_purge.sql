DELETE FROM orders WHERE id = ANY (ARRAY(
    SELECT id FROM orders WHERE status = 'REJECTED' AND created_at < $1 ORDER BY created_at LIMIT $2))
