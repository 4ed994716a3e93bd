-- When a mark was written, or the one before it; NULL if both are deleted.
SELECT (SELECT at FROM outbox_mark WHERE id <= $1 AND settled IS NOT NULL ORDER BY id DESC LIMIT 1)
