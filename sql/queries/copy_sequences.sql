-- The newest mark has the highest number, and a sequence may have stayed behind.
SELECT pg_catalog.setval('outbox_mark_id_seq', greatest(s.last_value, (SELECT pg_catalog.max(id) FROM outbox_mark)))
FROM outbox_mark_id_seq s
