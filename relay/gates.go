package relay

import (
	"context"
	"fmt"
	"sync"

	"posthaste/outbox"
)

// gates remembers which streams' gates one owner has raised. A new owner gets a new gates.
type gates struct {
	owner outbox.Owner
	sink  outbox.Sink
	store outbox.Store

	mu      sync.RWMutex
	adopted map[string]bool
	// fresh is called, before the first publish, for a stream that the adoption did not know.
	fresh func(ctx context.Context, stream string) error
}

func newGates(o outbox.Owner, sink outbox.Sink, store outbox.Store) *gates {
	return &gates{owner: o, sink: sink, store: store, adopted: map[string]bool{}}
}

// adopt raises the gate of one stream, and then calls after, if it is not nil. The stream counts as adopted when both
// have succeeded.
func (g *gates) adopt(ctx context.Context, stream string, after func(ctx context.Context, stream string) error) error {
	if err := g.sink.Adopt(ctx, stream, g.owner); err != nil {
		return fmt.Errorf("adopt stream %q: %w", stream, err)
	}
	if after != nil {
		if err := after(ctx, stream); err != nil {
			return err
		}
	}
	g.mu.Lock()
	g.adopted[stream] = true
	g.mu.Unlock()
	return nil
}

// ensure makes the stream ready for its first publish under this owner: its row is committed before its gate is raised,
// so that a later adoption cannot overlook it.
func (g *gates) ensure(ctx context.Context, stream string) error {
	g.mu.RLock()
	ok := g.adopted[stream]
	g.mu.RUnlock()
	if ok {
		return nil
	}
	if err := g.store.NoteStream(ctx, stream, g.owner.Epoch); err != nil {
		return err
	}
	return g.adopt(ctx, stream, g.fresh)
}

// streams lists the streams whose gates were raised.
func (g *gates) streams() []string {
	g.mu.RLock()
	defer g.mu.RUnlock()
	out := make([]string, 0, len(g.adopted))
	for s := range g.adopted {
		out = append(out, s)
	}
	return out
}
