-- The last mark that was written before a time; 0 if no mark was.
SELECT coalesce((SELECT id FROM outbox_mark WHERE settled IS NOT NULL AND at < $1 ORDER BY id DESC LIMIT 1), 0)
