-- Properties of the server. Needs no schema.
--
-- session.sql has changed settings of this session, synchronous_commit among them: current_setting does not show what
-- the role has. reset_val of pg_settings does.
SELECT pg_catalog.current_setting('server_version_num')::integer,
       pg_catalog.current_setting('wal_level'),
       pg_catalog.current_setting('max_replication_slots')::integer,
       pg_catalog.current_setting('max_wal_senders')::integer,
       (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       -- A managed service may grant replication by membership in a role.
       EXISTS (SELECT 1 FROM pg_roles WHERE rolname = current_user AND (rolreplication OR rolsuper)
               OR rolname = 'rds_replication' AND pg_catalog.pg_has_role(oid, 'USAGE')),
       pg_is_in_recovery(),
       coalesce(pg_catalog.current_setting('synchronized_standby_slots', true), ''),
       coalesce((SELECT setting FROM pg_settings WHERE name = 'idle_replication_slot_timeout'), ''),
       pg_catalog.current_setting('server_encoding'),
       pg_catalog.current_setting('default_transaction_read_only')::boolean
