-- What was delivered before there were marks, of an aggregate or all of it, for replay_page and replay_count: there is an index
-- for either. The first condition only names the parameter, which replay_few needs.
WITH history AS NOT MATERIALIZED (SELECT * FROM outbox_history_old WHERE $1::uuid IS NULL AND ($2::text IS NULL OR aggregate_id = $2))
