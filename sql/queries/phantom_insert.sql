INSERT INTO outbox_phantom (stream, entry_id, id, noticed_at)
SELECT $1, p.entry_id, p.id, $2 FROM unnest($3::uuid[], $4::text[]) AS p(id, entry_id)
ON CONFLICT DO NOTHING
