package sink

import (
	"context"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// signLasts is how long a sign of life counts: a relay that loses its Postgres stops signing, and the successor on a
// standby that is promoted waits no longer. twinLasts is how long it counts if it was renewed while somebody waited:
// then there are two databases with one identity, and a pause of the one must not give its streams to the other.
const (
	signLasts = 5 * time.Second
	twinLasts = 30 * time.Second
)

// Alive implements outbox.Sink. Who has no right to the key is taken to be alone.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	*outbox.Sign, error,
) {
	seen := ""
	if before != nil {
		seen = before.Text
	}
	reply, err := run(ctx, s.client, aliveScript, []any{
		1, "{posthaste:" + source.String() + "}:alive", m.ID, m.Server, m.Holder, signLasts.Milliseconds(),
		twinLasts.Milliseconds(), seen,
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
