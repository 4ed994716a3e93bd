SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at) FILTER (WHERE isfinite(created_at))), 0)::float8 FROM outbox
