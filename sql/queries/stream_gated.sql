UPDATE outbox_stream SET gated = true, groups = coalesce(groups, '{}')
WHERE stream = ANY ($1::text[]) AND (NOT gated OR groups IS NULL)
