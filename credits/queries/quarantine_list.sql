SELECT reason, stream_id, coalesce(entry->>'k', ''), coalesce(entry->>'a', ''), coalesce(entry->>'q', ''), at FROM credit_quarantine WHERE user_id = $1 ORDER BY at, stream_id LIMIT $2
