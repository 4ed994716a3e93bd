-- The events with an id, for replay_page and replay_count. They are looked up first, whatever the planner thinks of them: there
-- is one, and the index on the time would lead through all of history.
WITH history AS MATERIALIZED (
    SELECT * FROM outbox_history_old WHERE id = $1::uuid AND ($2::text IS NULL OR aggregate_id = $2)
)
