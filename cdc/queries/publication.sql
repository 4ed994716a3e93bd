SELECT
    p.oid IS NOT NULL                                                       AS present,
    coalesce(p.pubinsert, false)                                            AS inserts,
    coalesce(p.pubupdate OR p.pubdelete OR p.pubtruncate, false)            AS others,
    t.tablename IS NOT NULL                                                 AS listed,
    -- Row filters and column lists exist since Postgres 15. A row that is filtered out would be missed silently, a
    -- column that is left out stops the decoder.
    coalesce(pg_catalog.to_jsonb(t) ->> 'rowfilter'::text IS NULL
        AND coalesce(pg_catalog.to_jsonb(t) -> 'attnames'::text ?& $4::text[], true), false) AS whole,
    -- A change of the publication, or of the table in it, updates one of the two rows.
    pg_catalog.concat_ws(' ', p.oid, p.xmin, r.oid, r.xmin)                 AS version
FROM (SELECT) AS one
LEFT JOIN pg_publication p ON p.pubname = $1
LEFT JOIN pg_publication_tables t ON t.pubname = p.pubname AND t.schemaname = $2 AND t.tablename = $3
LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid
    AND r.prrelid = pg_catalog.to_regclass(pg_catalog.format('%I.%I', $2::text, $3::text))::oid
