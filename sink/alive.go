package sink

import (
	"context"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// Alive implements stream.Sink. A relay without the right to the key counts as the only one.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	*outbox.Sign, error,
) {
	seen := ""
	if before != nil {
		seen = before.Text
	}
	reply, err := run(ctx, s.o.Client, aliveScript, []any{
		1, "{posthaste:" + source.String() + "}:alive", m.ID, m.Server, m.Holder, outbox.SignLasts.Milliseconds(),
		outbox.TwinLasts.Milliseconds(), seen,
	})
	if err != nil && Class(err) == "noperm" {
		return nil, nil
	}
	if err != nil || len(reply) == 0 {
		return nil, s.failed("sign", "", err)
	}
	return &outbox.Sign{
		Member: outbox.Member{ID: text(reply, 0), Server: text(reply, 1), Holder: text(reply, 2)}, Text: text(reply, 3),
	}, nil
}
