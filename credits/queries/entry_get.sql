SELECT user_id, seq, op_id, fp, kind, outcome, amount, balance_after, reference, durability, epoch, stream_id,
    created_at
FROM credit_entries WHERE user_id = $1 AND op_id = $2
