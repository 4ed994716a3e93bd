SELECT reason, stream_id, coalesce(entry ->> 'k'::text, ''), coalesce(entry ->> 'a'::text, ''),
    coalesce(entry ->> 'q'::text, ''), at FROM credit_quarantine WHERE user_id = $1 ORDER BY at, stream_id LIMIT $2
