-- +goose Up

-- Which consumer group has seen which event: written in the handler's own transaction, so that the effect and the note
-- of it exist together or not at all.
CREATE TABLE inbox (
    -- A function of event_id (the day in a UUIDv7, 1970-01-01 for any other id). A unique key of a partitioned table
    -- must contain the partition key; because one id always gives the same day, (event_id, consumer_group) is unique.
    day            date        NOT NULL,
    consumer_group text        NOT NULL CHECK (pg_catalog.octet_length(consumer_group) BETWEEN 1 AND 255),
    event_id       uuid        NOT NULL,
    seen_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (event_id, consumer_group, day)
) PARTITION BY RANGE (day);
-- Catches ids without a day, and days without a partition: nothing depends on the housekeeping being in time. Its rows
-- are deleted by age, those of the daily partitions are dropped with them.
CREATE TABLE inbox_default PARTITION OF inbox DEFAULT;
CREATE INDEX inbox_default_seen_at ON inbox_default (seen_at);

-- +goose Down
DROP TABLE inbox;
