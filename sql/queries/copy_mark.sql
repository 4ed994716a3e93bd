-- Settles what copy_settled has written, which was settled by the time of the original's last mark, and nothing of this
-- server.
INSERT INTO outbox_mark (part, epoch, settled, hi, at, prefix, shards)
SELECT -1, r.epoch, '4:4:', greatest(h.high, m.hi), m.at, l.prefix, l.shards
FROM relay_state r, outbox_high h, outbox_layout l, (
    SELECT pg_catalog.max(s.hi) AS hi, pg_catalog.max(k.at) AS at
    FROM outbox_settled s JOIN outbox_mark k ON k.id = s.mark) m
