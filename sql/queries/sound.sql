-- Whether the index by which unsettled rows are found is there and valid, how many numbers a session takes at once, how
-- many parts can be claimed, whether the numbers rise, whether they continue after those of the table, and
-- whether the triggers that guard the rows are enabled.
SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('outbox_owed')::oid AND indisvalid),
    (SELECT seqcache FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid),
    (SELECT pg_catalog.count(*) FROM outbox_part),
    (SELECT seqincrement > 0::bigint FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid),
    (SELECT high FROM outbox_high) >= coalesce((
        SELECT pg_catalog.max(o.seq) FROM pg_catalog.generate_series(0, 15) AS p(part) CROSS JOIN LATERAL (
            SELECT seq FROM outbox_rows WHERE part = p.part::smallint ORDER BY seq DESC LIMIT 1) o), 0::bigint),
    (SELECT pg_catalog.count(*) = 3 FROM pg_trigger WHERE tgrelid = 'outbox'::regclass::oid
        AND tgname IN ('outbox_guard', 'outbox_guard_delete', 'outbox_guard_truncate')
        AND tgenabled IN ('O'::"char", 'A'::"char"))
