-- Settles what copy_settled has written, and nothing of this server.
INSERT INTO outbox_mark (part, epoch, settled, hi, prefix, shards)
SELECT -1, r.epoch, '4:4:', greatest(h.high, (SELECT pg_catalog.max(m.hi) FROM outbox_settled m)), l.prefix, l.shards
FROM relay_state r, outbox_high h, outbox_layout l
