-- +goose Up

-- What the stream entry calls its time, where that is not created_at: a replayed entry has to say the same as the first.
ALTER TABLE outbox_history ADD COLUMN event_time timestamptz;
-- What replay pages by. Rows arrive in this order, so the index grows at its end only. Building it makes settling wait,
-- about a second per million rows of history.
CREATE INDEX outbox_history_published ON outbox_history (published_at);

-- +goose Down
DROP INDEX outbox_history_published;
ALTER TABLE outbox_history DROP COLUMN event_time;
