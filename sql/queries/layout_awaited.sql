-- Whether there is a synchronous standby to wait for, and a change of the layout that it may not know of: see mark_replicated.
SELECT EXISTS (SELECT FROM outbox_layout) AND pg_catalog.current_setting('synchronous_standby_names') <> ''
