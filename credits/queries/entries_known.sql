SELECT e.user_id, e.seq, e.op_id FROM unnest($1::uuid[], $2::bigint[], $3::uuid[]) AS n(u, q, o)
CROSS JOIN LATERAL (SELECT user_id, seq, op_id FROM credit_entries WHERE user_id = n.u AND seq = n.q
    UNION SELECT user_id, seq, op_id FROM credit_entries WHERE user_id = n.u AND op_id = n.o) e
