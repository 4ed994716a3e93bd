-- Of what was delivered before there were marks.
SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'outbox_history_old'::regclass::oid
