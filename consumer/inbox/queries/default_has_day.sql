SELECT EXISTS (SELECT 1 FROM inbox_default WHERE day = $1)
