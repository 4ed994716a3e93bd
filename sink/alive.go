package sink

import (
	"context"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// signLasts is how long a sign of life counts. A relay that loses its Postgres stops signing, and its successor on a
// promoted standby waits no longer than this. twinLasts replaces it when the sign was renewed while another relay
// waited. Then two databases have one identity, and a pause of one must not give its streams to the other.
const (
	signLasts = 5 * time.Second
	twinLasts = 30 * time.Second
)

// Alive implements stream.Sink. A relay without the right to the key counts as the only one.
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
