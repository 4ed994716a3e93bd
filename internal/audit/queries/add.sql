INSERT INTO posthaste_audit (attempt, outcome, reason, action, actor, source, detail) VALUES ($1, $2, $3, $4, $5, $6,
    $7)
