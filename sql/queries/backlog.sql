SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - pg_catalog.min(created_at) FILTER (WHERE pg_catalog.isfinite(created_at))), 0)::float8 FROM outbox
