-- Each session takes one number at a time: see the baseline.
ALTER SEQUENCE IF EXISTS outbox_seq_seq CACHE 1
