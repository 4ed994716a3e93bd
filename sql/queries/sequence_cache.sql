-- Each session takes one number at a time: see the baseline.
ALTER SEQUENCE outbox_seq_seq CACHE 1
