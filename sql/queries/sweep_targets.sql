SELECT p.part, m.seq
FROM outbox_part p, LATERAL (SELECT o.seq FROM outbox o WHERE o.part = p.part ORDER BY o.seq DESC LIMIT 1) m
