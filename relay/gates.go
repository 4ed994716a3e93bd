package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// gates records the streams whose gates one owner has raised. A new owner gets a new gates.
type gates struct {
	owner  outbox.Owner
	layout outbox.Layout
	sink   stream.Sink
	store  KnownStreams

	// away are the streams that the adoption left out; they do not change. back does not call the sink before due.
	away map[string]left
	due  time.Time

	mu      sync.RWMutex
	adopted map[string]string // by name, the base of each
	// taken are the streams that would have the name of another type's.
	taken map[string]*outbox.TakenError
	// unconfirmed are the streams whose repair failed, until confirm finds that they are durable.
	unconfirmed map[string]error
	// fresh is called, before the first publish, for a stream that the adoption did not know.
	fresh func(ctx context.Context) error
}

func newGates(o outbox.Owner, layout outbox.Layout, sink stream.Sink, store KnownStreams) *gates {
	return &gates{
		owner: o, layout: layout, sink: sink, store: store, adopted: map[string]string{},
		taken: map[string]*outbox.TakenError{}, unconfirmed: map[string]error{},
	}
}

// adopt raises the gate of one stream, which was found intact or not.
func (g *gates) adopt(ctx context.Context, s outbox.Stream, intact bool) error {
	if err := g.sink.Adopt(ctx, s.Name, g.owner, intact); err != nil || s.Base == s.Name {
		return err
	}
	return g.sink.Sharded(ctx, s.Base)
}

// ready notes that a stream may be published to.
func (g *gates) ready(s outbox.Stream) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.adopted[s.Name] = s.Base
}

// left is a stream that an adoption leaves out.
type left struct {
	why error
	// repairing is the owner whose repair of the stream failed, if that is the reason.
	repairing outbox.Owner
}

// leave notes, before the gates are used, which streams the adoption leaves out.
func (g *gates) leave(away map[string]left, due time.Time) {
	g.away, g.due = maps.Clone(away), due
	for stream, l := range away {
		if l.repairing.Epoch > 0 {
			g.unconfirmed[stream] = l.why
		}
	}
}

// back returns ErrGap if a stream that the adoption left out can be looked at, and confirmed if its repair failed:
// before anything is published there, another adoption must find out what it has lost.
func (g *gates) back(ctx context.Context, stream string) error {
	away := g.away[stream]
	if time.Now().Before(g.due) {
		return away.why
	}
	_, err := g.sink.Look(ctx, g.owner.Source, []string{stream}, nil)
	if err == nil {
		g.mu.RLock()
		err = g.unconfirmed[stream]
		g.mu.RUnlock()
	}
	if err == nil || displaced(err) {
		err = fmt.Errorf("stream %q answers again: %w", stream, outbox.ErrGap)
	}
	return err
}

// confirm waits for the durability of the streams whose repair failed.
func (g *gates) confirm(ctx context.Context) {
	for stream, away := range g.away {
		if away.repairing.Epoch == 0 {
			continue
		}
		actx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
		err := g.sink.Confirm(actx, away.repairing, []outbox.Mark{{Stream: stream}})
		cancel()
		g.mu.Lock()
		g.unconfirmed[stream] = err
		g.mu.Unlock()
	}
}

// Ensure prepares the stream for its first publish under this owner. It commits the stream's row before it raises the
// gate, so that a later adoption cannot overlook the stream. For a stream of another type it returns a
// *outbox.TakenError. If a gate was raised before and no longer exists, Ensure returns ErrGap: a follower must not
// recreate it.
func (g *gates) Ensure(ctx context.Context, stream string) error {
	if g.away[stream].why != nil {
		return g.back(ctx, stream)
	}
	s := outbox.Stream{Name: stream, Base: outbox.BaseName(stream, g.layout.Shards)}
	g.mu.RLock()
	base, ok := g.adopted[stream]
	taken := g.taken[stream]
	g.mu.RUnlock()
	if taken != nil {
		return taken
	}
	if ok && base == s.Base {
		return nil
	}
	if err := g.follow(ctx, s); err != nil {
		return err
	}
	gated, err := g.store.NoteStream(ctx, s.Name, s.Base, g.owner.Epoch)
	if errors.As(err, &taken) {
		g.mu.Lock()
		g.taken[stream] = taken
		g.mu.Unlock()
	}
	if err != nil {
		return err
	}
	if !gated {
		if gated, err = g.known(ctx, s); err != nil {
			return err
		}
	}
	if err := g.adopt(ctx, s, gated); err != nil {
		return err
	}
	if !gated {
		if err := g.store.Gated(ctx, []string{stream}); err != nil {
			return err
		}
	}
	if g.fresh != nil {
		if err := g.fresh(ctx); err != nil {
			return err
		}
	}
	g.ready(s)
	return nil
}

// streamLane is the lane of the slot reader.
func (g *gates) streamLane() outbox.Lane {
	return outbox.Lane{Part: outbox.StreamLane, Nonce: g.owner.Nonce}
}

// follow gives a new stream the consumer groups of the other streams of its type. Without them, a consumer that is away
// while the number of streams per type changes would not keep its events from being trimmed.
func (g *gates) follow(ctx context.Context, s outbox.Stream) error {
	list, err := g.store.Streams(ctx)
	if err != nil {
		return err
	}
	var others []string
	for _, o := range list {
		switch {
		case o == s:
			return nil
		case o.Base == s.Base:
			others = append(others, o.Name)
		}
	}
	if len(others) == 0 {
		return nil
	}
	return g.sink.Follow(ctx, s.Name, others)
}

// known returns ErrGap if the stream was published to but the table does not list it. Then the table has gone back in
// time, and an adoption must compare it with the streams. If another instance is raising the gate at this moment, the
// table lists the stream as gated, and known returns true.
func (g *gates) known(ctx context.Context, s outbox.Stream) (gated bool, err error) {
	states, err := g.sink.Look(ctx, g.owner.Source, []string{s.Name}, nil)
	if err != nil {
		return false, err
	}
	if !states[0].Gate || states[0].Last == "" {
		return false, nil
	}
	// An instance that raises a gate records it in the table before it publishes.
	if gated, err = g.store.NoteStream(ctx, s.Name, s.Base, g.owner.Epoch); err == nil && !gated {
		err = fmt.Errorf("stream %q is not known here: %w", s.Name, outbox.ErrGap)
	}
	return gated, err
}

// streams lists the streams whose gates were raised.
func (g *gates) streams() []string {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return slices.Collect(maps.Keys(g.adopted))
}
