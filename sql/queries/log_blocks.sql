SELECT pg_catalog.pg_relation_size('outbox') / pg_catalog.current_setting('block_size')::bigint
