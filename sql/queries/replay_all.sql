-- All of history, for replay_page and replay_count. The conditions only name the parameters, which replay_few needs.
WITH history AS NOT MATERIALIZED (SELECT * FROM outbox_history WHERE $1::uuid IS NULL AND $2::text IS NULL)
