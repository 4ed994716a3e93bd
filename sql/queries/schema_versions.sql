SELECT line, pg_catalog.max(version) FROM posthaste_migrations GROUP BY line
