-- What people and their commands may do beside reading posthaste's tables.
-- Every change leaves an entry. Its time and role fill themselves.
GRANT INSERT (attempt, outcome, reason, action, actor, source, detail) ON posthaste_audit TO posthaste_operator;
-- mode
GRANT INSERT (name), UPDATE (name, desired_mode, changed_at) ON relay_state TO posthaste_operator;
-- dead retry, dead drop
GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at) ON outbox TO posthaste_operator;
GRANT UPDATE (retry_seq, dropped_at) ON outbox_dead TO posthaste_operator;
-- replay
GRANT UPDATE (replayed_at) ON outbox_loss TO posthaste_operator;
-- streams drop
GRANT UPDATE (dropped_at) ON outbox_stream TO posthaste_operator;
-- credits unfreeze; of credit_epoch it only locks a row, which wants the right to change some column.
GRANT UPDATE (frozen) ON credit_accounts TO posthaste_operator;
GRANT INSERT (bucket), UPDATE (bumped_at) ON credit_epoch TO posthaste_operator;
