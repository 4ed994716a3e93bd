-- The changes of the table by other tools that break a guarantee, and their remedies.
WITH sequence AS (SELECT seqcache, seqincrement FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass::oid)
SELECT c.what, c.remedy FROM (
    SELECT p.n = 16::bigint,
        pg_catalog.format('the table outbox_part has %s rows of 16, and a sweep skips the events of the others', p.n),
        'execute INSERT INTO outbox_part SELECT generate_series(0, 15) ON CONFLICT DO NOTHING'
    FROM (SELECT pg_catalog.count(*) AS n FROM outbox_part) p
    UNION ALL
    SELECT seqincrement > 0::bigint,
        'the numbers of the sequence outbox_seq_seq fall, so a later event of an aggregate is published first',
        'ALTER SEQUENCE outbox_seq_seq INCREMENT BY 1'
    FROM sequence
    UNION ALL
    SELECT (SELECT high FROM outbox_high) >= coalesce((
            SELECT pg_catalog.max(o.seq) FROM pg_catalog.generate_series(0, 15) AS p(part) CROSS JOIN LATERAL (
                SELECT seq FROM outbox_rows WHERE part = p.part::smallint ORDER BY seq DESC LIMIT 1) o), 0::bigint),
        'the sequence outbox_seq_seq is behind the table, so inserts fail and later events have lower numbers',
        'execute SELECT setval(''outbox_seq_seq'', (SELECT max(seq) FROM outbox))'
    UNION ALL
    SELECT (SELECT pg_catalog.count(*) = 3 FROM pg_trigger WHERE tgrelid = 'outbox'::regclass::oid
            AND tgname IN ('outbox_guard', 'outbox_guard_delete', 'outbox_guard_truncate')
            AND tgenabled IN ('O'::"char", 'A'::"char")),
        'a trigger of the table outbox is disabled or missing, so changed rows are published differently in the modes '
            'cdc and poll',
        'ALTER TABLE outbox ENABLE TRIGGER USER, or create it as the migration does'
    UNION ALL
    SELECT seqcache = 1::bigint,
        pg_catalog.format('the sequence outbox_seq_seq has CACHE %s, so a later event of an aggregate can have a lower '
            'number and be published first', seqcache),
        'run posthaste migrate, which sets it to 1'
    FROM sequence
    UNION ALL
    SELECT EXISTS (SELECT FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('outbox_owed')::oid AND indisvalid),
        'the index outbox_owed is missing or not valid, so each search for events reads the whole table, and the '
            'limits of events are not checked',
        'REINDEX INDEX outbox_owed, or create it as the migration does'
) AS c(sound, what, remedy) WHERE c.sound IS NOT TRUE
