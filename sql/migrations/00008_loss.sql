-- +goose Up

-- Where the owner publishes: the process of Redis it has looked at. NULL if that is not known.
ALTER TABLE relay_state ADD COLUMN sink text;

-- Events that were settled, and are not in their stream any more because Redis has forgotten them. Noted by an adoption as a
-- suspicion, counted by the leader; what turns out to be nothing is deleted.
CREATE TABLE outbox_loss (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    noticed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- '' for a failover of Postgres, which may have forgotten what was settled: it is published twice.
    stream      text        NOT NULL,
    -- The last id that the stream ever gave, '' without a stream: what history has behind it is lost.
    after_entry text        NOT NULL DEFAULT '',
    -- The time by Redis' clock when it was noted, in ms: ids given out since then are not smaller.
    until_ms    bigint      NOT NULL DEFAULT 0,
    -- Nothing that was settled before this is lost; NULL if that is not known.
    since       timestamptz,
    -- NULL until it is counted, -1 if it cannot be known.
    events      bigint,
    -- When the first and the last of them were settled: the range to replay.
    first_at    timestamptz,
    last_at     timestamptz,
    -- Set when the leader has said it.
    told        boolean     NOT NULL DEFAULT false,
    -- Set when the range was published again.
    replayed_at timestamptz
);

-- +goose Down
DROP TABLE outbox_loss;
ALTER TABLE relay_state DROP COLUMN sink;
