-- Locks all parts for this transaction, in their order: the holder of a part's lock may write its mark.
SELECT pg_catalog.count(*) FROM (
    SELECT FROM pg_catalog.set_config('lock_timeout', '4s', true), outbox_part p ORDER BY p.part FOR UPDATE OF p
) locked
