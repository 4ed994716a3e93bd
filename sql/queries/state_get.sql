SELECT desired_mode, active_mode, epoch, nonce, source, coalesce(handover_lsn, '0/0')::text, coalesce(owner, ''),
    coalesce(degraded, ''), coalesce(system_identifier, 0), coalesce(timeline, 0), changed_at, coalesce(slot_barrier,
        0),
    coalesce(sink, ''), coalesce(l.prefix, ''),
    CASE WHEN EXISTS (SELECT FROM outbox_mark m WHERE m.part = -1 AND m.settled IS NOT NULL) OR 16 = (
        SELECT count(*) FILTER (WHERE EXISTS (SELECT FROM outbox_mark m WHERE m.part = p AND m.settled IS NOT NULL))
        FROM pg_catalog.generate_series(0, 15) p) THEN l.shards ELSE 0 END,
    pg_catalog.date_part('epoch', pg_catalog.pg_postmaster_start_time())::text
FROM relay_state LEFT JOIN outbox_layout l ON true WHERE name = $1
