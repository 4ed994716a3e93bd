-- +goose Up

-- What the stream entry calls its time, where that is not created_at: a replayed entry has to say the same as the first.
ALTER TABLE outbox_history ADD COLUMN event_time timestamptz;
-- What replay pages by. Rows arrive in this order, so the index grows at its end only. Building the two makes settling wait,
-- a few seconds per million rows of history.
CREATE INDEX outbox_history_published ON outbox_history (published_at);
-- And by aggregate: without the place in it, each page of an aggregate would read all of the aggregate.
DROP INDEX outbox_history_aggregate;
CREATE INDEX outbox_history_aggregate ON outbox_history (aggregate_id, published_at, seq);

-- +goose Down
DROP INDEX outbox_history_aggregate;
CREATE INDEX outbox_history_aggregate ON outbox_history (aggregate_id);
DROP INDEX outbox_history_published;
ALTER TABLE outbox_history DROP COLUMN event_time;
