SELECT coalesce(pg_catalog.array_agg(rolname::text ORDER BY rolname), '{}') FROM pg_roles
    WHERE rolname = ANY ($1::name[])
