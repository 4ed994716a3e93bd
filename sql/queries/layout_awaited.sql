-- Whether there is a synchronous standby to wait for, and a change of the layout that it may not have: see
-- mark_replicated. A layout under which nothing was settled does not count.
SELECT EXISTS (
        SELECT FROM outbox_mark m, outbox_layout l WHERE m.hi > 0 AND (m.prefix, m.shards) <> (l.prefix, l.shards)
    ) AND pg_catalog.current_setting('synchronous_standby_names') <> ''
