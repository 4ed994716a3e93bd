-- xmin, not xmax: a snapshot's xmax covers only completed transactions.
SELECT pg_catalog.pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= $1::bigint
