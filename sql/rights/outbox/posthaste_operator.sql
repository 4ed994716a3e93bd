-- Operators and their commands, in addition to reading posthaste's tables.
-- Every change is audited. The time and the role of the entry fill themselves.
GRANT INSERT (attempt, outcome, reason, action, actor, source, detail) ON posthaste_audit TO posthaste_operator;
-- mode
GRANT INSERT (name), UPDATE (name, desired_mode, changed_at) ON relay_state TO posthaste_operator;
-- dead retry, dead drop
GRANT EXECUTE ON FUNCTION outbox_retry TO posthaste_operator;
GRANT UPDATE (dropped_at) ON outbox_dead TO posthaste_operator;
-- replay, phantoms --ack
GRANT UPDATE (replayed_at) ON outbox_reconcile TO posthaste_operator;
GRANT UPDATE (acked_at) ON outbox_phantom TO posthaste_operator;
-- adopt
GRANT INSERT (stream, base, adopted_epoch, gated), UPDATE (gated) ON outbox_stream TO posthaste_operator;
-- streams drop
GRANT UPDATE (dropped_at, groups) ON outbox_stream TO posthaste_operator;
