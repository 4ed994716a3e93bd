-- Whether the index by which unsettled rows are found is there and valid, how many numbers a session takes at once, and
-- how many parts can be claimed.
SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('outbox_owed')::oid AND indisvalid),
    (SELECT seqcache FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid),
    (SELECT pg_catalog.count(*) FROM outbox_part)
