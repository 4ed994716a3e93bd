-- How many slots and walsenders others than the relay use. $1 is the name of the relay's slot.
SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name <> $1)::integer,
       (SELECT count(*) FROM pg_stat_replication
        WHERE pid NOT IN (SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1 AND active))::integer
