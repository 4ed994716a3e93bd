-- Writes nothing, and is refused where nothing can be written.
INSERT INTO outbox (id) SELECT NULL::uuid WHERE false
