SELECT id, part, at FROM outbox_mark WHERE id >= $1 AND id <= $2 AND settled IS NOT NULL ORDER BY id LIMIT $3
