-- The events with an id or of an aggregate, for replay_page and replay_count. They are looked up first, whatever the planner
-- thinks of them: there are few, and the index on the time would lead through all of history.
WITH history AS MATERIALIZED (
    SELECT * FROM outbox_history WHERE ($1::uuid IS NULL OR id = $1) AND ($2::text IS NULL OR aggregate_id = $2)
)
