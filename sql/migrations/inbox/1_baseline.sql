-- The events that each consumer group has handled. A handler inserts the row in its own transaction, so that its effect
-- and the row exist together or not at all.
CREATE TABLE inbox (
    -- The day in a UUIDv7, 1970-01-01 for any other id. A unique key of a partitioned table must contain the partition
    -- key. Because an id always gives the same day, (event_id, consumer_group) is unique.
    day            date        NOT NULL,
    consumer_group text        NOT NULL CONSTRAINT "1 to 255 bytes" CHECK (
        pg_catalog.octet_length(consumer_group) BETWEEN 1 AND 255),
    event_id       uuid        NOT NULL,
    seen_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (event_id, consumer_group, day)
) PARTITION BY RANGE (day);
-- Takes ids without a day, and days without a partition. Its rows are deleted by age; a day's partition is dropped as a
-- whole.
CREATE TABLE inbox_default PARTITION OF inbox DEFAULT;
CREATE INDEX inbox_default_seen_at ON inbox_default (seen_at);
