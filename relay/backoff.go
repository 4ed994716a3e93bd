package relay

import (
	"context"
	"time"

	"posthaste/internal/pause"
)

const (
	// publishTimeout bounds one attempt to publish a batch, or one other call of the sink.
	publishTimeout = 5 * time.Second
	// patience is how long something may fail before readiness reports it.
	patience = 5 * time.Second
)

// backoff doubles from first to most, with jitter. The zero value starts at first.
type backoff struct {
	first, most, next time.Duration
}

func (b *backoff) wait(ctx context.Context) {
	b.next = min(max(b.next*2, b.first), b.most)
	pause.About(ctx, b.next)
}

func (b *backoff) reset() { b.next = 0 }
