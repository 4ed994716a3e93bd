-- The session is the one that was read: another one may hold the leader's lock by now, and another one have the number.
SELECT pg_catalog.pg_terminate_backend(pid) FROM outbox_leader WHERE pid = $1
