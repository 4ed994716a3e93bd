SELECT p.part FROM outbox_part p WHERE EXISTS (SELECT 1 FROM outbox o WHERE o.part = p.part) ORDER BY p.part
