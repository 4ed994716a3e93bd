-- Whether sessions take several numbers at once.
SELECT seqcache > 1::bigint FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid
