SELECT coalesce(pg_catalog.max(version_id), 0) FROM posthaste_migrations WHERE is_applied
