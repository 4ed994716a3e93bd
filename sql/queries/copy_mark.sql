-- Holds what copy_settled has written, and nothing of this server.
INSERT INTO outbox_mark (part, epoch, settled, hi)
SELECT -1, r.epoch, '4:4:', greatest(CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, (SELECT pg_catalog.max(m.hi) FROM outbox_settled m))
FROM relay_state r, outbox_seq_seq s
