-- How many slots and walsenders are in use.
SELECT (SELECT count(*) FROM pg_replication_slots)::integer, (SELECT count(*) FROM pg_stat_replication)::integer
