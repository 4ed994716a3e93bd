-- Notes the streams $1, of the types $2, that posthaste adopt takes over. Their gates count as raised: what another
-- database has put into these streams does not say that this one has gone back in time.
INSERT INTO outbox_stream AS s (stream, base, adopted_epoch, gated)
SELECT t.stream, t.base, $3, true FROM unnest($1::text[], $2::text[]) AS t(stream, base)
ON CONFLICT (stream) DO UPDATE SET gated = true WHERE NOT s.gated
