-- Writes nothing, and is refused, or waits for a lock, where no order and event can be written.
WITH o AS (INSERT INTO orders (id) SELECT NULL::uuid WHERE false)
INSERT INTO outbox (id) SELECT NULL::uuid WHERE false
