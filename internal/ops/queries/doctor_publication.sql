-- Whether the publication $1 announces inserts into the outbox.
SELECT EXISTS (SELECT 1 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
               WHERE p.pubname = $1 AND r.prrelid = 'outbox'::regclass::oid AND p.pubinsert)
