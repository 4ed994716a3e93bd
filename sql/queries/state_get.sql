SELECT desired_mode, pg_catalog.split_part(active_mode, '.', 1), epoch, nonce, source, coalesce(handover_lsn, '0/0')::text, coalesce(owner, ''),
       coalesce(degraded, ''), coalesce(system_identifier, 0), coalesce(timeline, 0), changed_at, coalesce(slot_barrier, 0), coalesce(sink, ''), shards
FROM relay_state WHERE name = $1
