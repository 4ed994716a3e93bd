SELECT pg_catalog.set_config('application_name', $1, false) IS NOT NULL
