SELECT seq, fp, kind, outcome, amount, balance_after, durability, stream_id, created_at FROM credit_entries
    WHERE user_id = $1 AND op_id = $2
