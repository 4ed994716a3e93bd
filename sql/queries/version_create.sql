CREATE TABLE posthaste_migrations (
    line       text        NOT NULL,
    version    integer     NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (line, version)
)
