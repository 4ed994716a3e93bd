-- credits unfreeze. It only locks a row of credit_epoch, which requires the right to update some column.
GRANT UPDATE (frozen) ON credit_accounts TO posthaste_operator;
GRANT INSERT (bucket), UPDATE (bumped_at) ON credit_epoch TO posthaste_operator;
