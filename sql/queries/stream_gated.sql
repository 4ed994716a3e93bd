UPDATE outbox_stream SET gated = true WHERE stream = ANY ($1::text[]) AND NOT gated
