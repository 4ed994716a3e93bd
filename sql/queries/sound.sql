-- Whether the index by which unsettled rows are found is there and valid, and how many numbers a session takes at once.
SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('outbox_owed')::oid AND indisvalid),
    (SELECT seqcache FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid)
