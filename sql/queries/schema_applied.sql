INSERT INTO posthaste_migrations (line, version) VALUES ($1, $2)
