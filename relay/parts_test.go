package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

func TestBlocksKeepTheOrderOfAnAggregate(t *testing.T) {
	t.Parallel()
	var none *blocks
	if none.blocker(&outbox.Record{AggregateID: "a"}) != "" {
		t.Error("without block-key something is blocked")
	}
	b := newBlocks()
	ev := func(seq int64, aggregate string) *outbox.Record {
		return &outbox.Record{ID: uuid.New(), Seq: seq, AggregateType: "order", AggregateID: aggregate}
	}
	first, second, other := ev(1, "a"), ev(2, "a"), ev(3, "b")
	b.add(first)
	if got := b.blocker(second); got != first.ID.String() {
		t.Errorf("the event behind a parked one: blocked by %q, want %s", got, first.ID)
	}
	if got := b.blocker(other); got != "" {
		t.Errorf("another aggregate is blocked by %q", got)
	}
	b.add(second)
	// A retry gives the first event a new number; its place stays the first.
	again, retried := *first, *second
	again.Seq, retried.Seq = 10, 11
	if got := b.blocker(&retried); got != first.ID.String() {
		t.Errorf("the retried second event: blocked by %q, want the first", got)
	}
	if got := b.blocker(&again); got != "" {
		t.Errorf("the retried first event is blocked by %q", got)
	}
	if got := b.blocker(&retried); got != "" {
		t.Errorf("the second event, retried behind the first, is blocked by %q", got)
	}
	early := ev(9, "a")
	if got := b.blocker(early); got == "" {
		t.Error("an event before the retried rows overtakes them")
	}
	b.add(&again)
	if got := b.blocker(&retried); got != first.ID.String() {
		t.Errorf("the retried second event, the first being parked again: blocked by %q, want the first", got)
	}
	// The first is published: only the second is parked.
	err := b.refresh(func() ([]outbox.Dead, error) {
		return []outbox.Dead{{ID: second.ID, Seq: 2, AggregateType: "order", AggregateID: "a"}}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := b.blocker(&retried); got != "" {
		t.Errorf("the retried second event is blocked by %q, though the first is gone", got)
	}
}

// A refresh keeps an event that is parked while the list of parked events is being read.
func TestBlocksRefreshKeepsWhatIsParkedMeanwhile(t *testing.T) {
	t.Parallel()
	b := newBlocks()
	parked := &outbox.Record{ID: uuid.New(), Seq: 1, AggregateType: "order", AggregateID: "a"}
	err := b.refresh(func() ([]outbox.Dead, error) {
		b.add(parked) // committed after the list's snapshot
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := b.blocker(&outbox.Record{
		ID: uuid.New(), Seq: 2, AggregateType: "order",
		AggregateID: "a",
	}); got != parked.ID.String() {
		t.Errorf("blocked by %q, want %s", got, parked.ID)
	}
	failure := errors.New("postgres is gone")
	if err := b.refresh(func() ([]outbox.Dead, error) { return nil, failure }); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
	if b.blocker(&outbox.Record{ID: uuid.New(), Seq: 2, AggregateType: "order", AggregateID: "a"}) == "" {
		t.Error("a failed refresh forgot what was known")
	}
}

func TestReasonsOfErrors(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		outbox.ReasonStop: nil, outbox.ReasonGap: fmt.Errorf("publish: %w", outbox.ErrGap),
		outbox.ReasonFenced:     fmt.Errorf("x: %w", &outbox.FencedError{}),
		outbox.ReasonBudget:     fmt.Errorf("x: %w", &outbox.SlotError{Reason: outbox.ReasonBudget}),
		outbox.ReasonConnection: errors.New("anything"),
	} {
		if got := slotReason(err); got != want {
			t.Errorf("%v: got %s, want %s", err, got, want)
		}
	}
	if got := knownReason("made up"); got != reasonOther {
		t.Errorf("an unknown reason became label %q", got)
	}
	if got := slotReason(fmt.Errorf("x: %w", outbox.ErrSuperseded)); got != outbox.ReasonFenced {
		t.Errorf("superseded: %s", got)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	h := newHealth()
	h.fail("redis", "gone")
	h.fail("publish", "")
	h.degrade("slot", "wal_level")
	bad, degraded := h.lists()
	if !slices.Equal(bad, []string{"publish", "redis: gone"}) || !slices.Equal(degraded, []string{"slot: wal_level"}) {
		t.Errorf("got %q, %q", bad, degraded)
	}
	if !h.clear("redis") || h.clear("redis") {
		t.Error("clear does not tell whether there was something")
	}
}

// Of two concurrent refreshes, the one that began first keeps the events that were parked while the second was reading.
func TestBlocksRefreshesDoNotMeet(t *testing.T) {
	t.Parallel()
	b := newBlocks()
	parked := &outbox.Record{ID: uuid.New(), Seq: 1, AggregateType: "order", AggregateID: "a"}
	reading, second := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(second)
		<-reading
		_ = b.refresh(func() ([]outbox.Dead, error) {
			return []outbox.Dead{{ID: parked.ID, Seq: 1, AggregateType: "order", AggregateID: "a"}}, nil
		})
	}()
	err := b.refresh(func() ([]outbox.Dead, error) {
		close(reading)
		b.add(parked)
		return nil, nil // the list is older than the parking
	})
	if err != nil {
		t.Fatal(err)
	}
	<-second
	if b.blocker(&outbox.Record{ID: uuid.New(), Seq: 2, AggregateType: "order", AggregateID: "a"}) == "" {
		t.Error("a parked event was forgotten")
	}
}

// A stream met late gets its own H or is not used: a failure in between must not be taken for success the next time.
func TestGatesDoNotForgetTheLateH(t *testing.T) {
	t.Parallel()
	g := newGates(outbox.Owner{Epoch: 3}, outbox.Layout{Prefix: "outbox.", Shards: 1}, &memorySink{}, &memoryStore{})
	failure, calls := errors.New("postgres hiccups"), 0
	g.fresh = func(context.Context, string) error {
		if calls++; calls == 1 {
			return failure
		}
		return nil
	}
	if err := g.Ensure(t.Context(), "outbox.late"); !errors.Is(err, failure) {
		t.Fatalf("first: %v", err)
	}
	if err := g.Ensure(t.Context(), "outbox.late"); err != nil || calls != 2 {
		t.Errorf("second: %v, asked %d times for H, want 2", err, calls)
	}
}

// memorySink is a Sink of ours, for what does no I/O.
type memorySink struct {
	stream.Gates
	adopted  []string
	followed []string
	err      error
}

func (m *memorySink) Look(_ context.Context, _ uuid.UUID, streams []string, _ map[string]string) (
	[]outbox.StreamState, error,
) {
	return make([]outbox.StreamState, len(streams)), nil
}

func (m *memorySink) Adopt(_ context.Context, stream string, _ outbox.Owner, _ bool) error {
	m.adopted = append(m.adopted, stream)
	return m.err
}

func (*memorySink) Sharded(context.Context, string) error { return nil }

func (m *memorySink) Follow(_ context.Context, stream string, others []string) error {
	m.followed = append(m.followed, stream+" "+strings.Join(others, " "))
	return nil
}

type memoryStore struct {
	noted []string
	known []outbox.Stream
}

func (m *memoryStore) Streams(context.Context) ([]outbox.Stream, error) { return m.known, nil }

func (m *memoryStore) Gated(context.Context, []string) error { return nil }

func (m *memoryStore) NoteStream(_ context.Context, stream, base string, _ int64) (bool, error) {
	for _, s := range m.known {
		if s.Name == stream && s.Base != base {
			return false, &outbox.TakenError{Stream: stream, Base: s.Base}
		}
	}
	m.noted = append(m.noted, stream)
	return false, nil
}

func TestGatesNoteBeforeTheyAdopt(t *testing.T) {
	t.Parallel()
	sink, store := &memorySink{}, &memoryStore{}
	g := newGates(outbox.Owner{Epoch: 3}, outbox.Layout{Prefix: "outbox.", Shards: 1}, sink, store)
	fresh := 0
	g.fresh = func(context.Context, string) error {
		if len(store.noted) != 1 || len(sink.adopted) != 1 {
			t.Errorf("noted %v, adopted %v", store.noted, sink.adopted)
		}
		fresh++
		return nil
	}
	for range 3 {
		if err := g.Ensure(t.Context(), "outbox.order"); err != nil {
			t.Fatal(err)
		}
	}
	if fresh != 1 || len(store.noted) != 1 || len(sink.adopted) != 1 {
		t.Errorf("fresh %d, noted %v, adopted %v: want once each", fresh, store.noted, sink.adopted)
	}
	sink.err = outbox.ErrGap
	if err := g.Ensure(t.Context(), "outbox.other"); !errors.Is(err, outbox.ErrGap) {
		t.Errorf("got %v", err)
	}
	if len(store.noted) != 2 || slices.Contains(g.streams(), "outbox.other") {
		t.Errorf("noted %v, streams %v: a stream is noted before, and known only after, its gate is raised",
			store.noted, g.streams())
	}
}

// A new stream of a type with other streams gets their groups before it is noted. A stream that is already noted is
// left as it is: it has the groups, or an operator has dropped them.
func TestANewStreamOfATypeGetsItsGroups(t *testing.T) {
	t.Parallel()
	store := &memoryStore{known: []outbox.Stream{
		{Name: "outbox.order", Base: "outbox.order"},
		{Name: "outbox.order.1", Base: "outbox.order"},
		{Name: "outbox.user", Base: "outbox.user"},
	}}
	sink := &memorySink{}
	g := newGates(outbox.Owner{Epoch: 3}, outbox.Layout{Prefix: "outbox.", Shards: 4}, sink, store)
	for _, stream := range []string{"outbox.order.3", "outbox.order.1", "outbox.late.2", "outbox.order.3"} {
		if err := g.Ensure(t.Context(), stream); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"outbox.order.3 outbox.order outbox.order.1"}; !slices.Equal(sink.followed, want) {
		t.Errorf("followed %q, want %q", sink.followed, want)
	}
}

// The stream of another type is never made ready, even if its gate was raised. Other streams are unaffected.
func TestAStreamOfAnotherTypeIsNotReady(t *testing.T) {
	t.Parallel()
	known := outbox.Stream{Name: "outbox.order.1", Base: "outbox.order"}
	g := newGates(outbox.Owner{Epoch: 3}, outbox.Layout{Prefix: "outbox.", Shards: 1}, &memorySink{},
		&memoryStore{known: []outbox.Stream{known}})
	if err := g.adopt(t.Context(), known, true, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		err := g.Ensure(t.Context(), known.Name)
		if taken := (*outbox.TakenError)(nil); !errors.As(err, &taken) || taken.Base != known.Base {
			t.Errorf("the stream of another type: %v", err)
		}
	}
	if err := g.Ensure(t.Context(), "outbox.order.2"); err != nil {
		t.Error(err)
	}
}

// transactions is a fake Store and Slots with at most one open transaction. It records how the slot is moved.
type transactions struct {
	Store
	outbox.Slots
	open    bool
	moved   []outbox.LSN
	barrier uint64
	epoch   int64 // of the state
	status  outbox.SlotStatus
}

func (m *transactions) Horizon(context.Context) (outbox.LSN, uint64, error) { return 100, 7, nil }

func (m *transactions) VisibleBelow(_ context.Context, xid uint64) (bool, error) { return !m.open, nil }

func (m *transactions) Nudge(context.Context) error { return nil }

func (m *transactions) Advance(_ context.Context, to outbox.LSN) error {
	m.moved = append(m.moved, to)
	return nil
}

func (m *transactions) State(context.Context) (outbox.State, error) {
	return outbox.State{Barrier: m.barrier}, nil
}

func (m *transactions) RaiseBarrier(_ context.Context, epoch int64, xid uint64, known bool) error {
	switch {
	case epoch != m.epoch:
		return outbox.ErrSuperseded
	case known && m.barrier == outbox.BarrierUnknown:
		m.barrier = xid
	default:
		m.barrier = max(m.barrier, xid)
	}
	return nil
}

func (m *transactions) LowerBarrier(_ context.Context, epoch int64, xid uint64) error {
	if epoch == m.epoch && (m.barrier <= xid || m.barrier == outbox.BarrierUnknown) {
		m.barrier = 0
	}
	return nil
}

func (m *transactions) Status(context.Context) (outbox.SlotStatus, error) { return m.status, nil }

// A commit that is not visible yet is not in the table for a sweep, and behind the slot it is not in the stream: the
// slot stays before it. Only the budget does not wait, and that is noted where the next leader finds it.
func TestSlotFollowsWhatIsVisible(t *testing.T) {
	t.Parallel()
	m := &transactions{open: true}
	k := New(Options{Store: m, Slots: m}).keeper
	for range 3 {
		if err := k.follow(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.moved) > 0 {
		t.Errorf("the slot was moved to %v beside an open transaction", m.moved)
	}
	m.open = false
	if err := k.follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(m.moved, []outbox.LSN{100}) || m.barrier != 0 {
		t.Errorf("the slot was moved to %v, and a hand-over has to wait for transaction %d; want 100, and none",
			m.moved, m.barrier)
	}
	m.open = true
	if err := k.advance(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(m.moved) != 2 || m.barrier != 7 {
		t.Errorf("moved to %v for the budget; a hand-over waits for transaction %d, want 7", m.moved, m.barrier)
	}
	m.epoch++ // another leads
	if err := k.advance(t.Context()); !errors.Is(err, outbox.ErrSuperseded) || len(m.moved) != 2 {
		t.Errorf("a leader that was deposed moves the slot: %v, %v", m.moved, err)
	}
}

// The first hand-over replaces an unknown barrier by a known one, so that the next one need not wait for younger
// transactions.
func TestAnUnknownBarrierIsMadeKnown(t *testing.T) {
	t.Parallel()
	m := &transactions{open: true, barrier: outbox.BarrierUnknown}
	k := New(Options{Store: m, Slots: m}).keeper
	for _, c := range []struct{ open, hidden bool }{{true, true}, {false, false}} {
		m.open = c.open
		if hidden, err := k.hidden(t.Context()); err != nil || hidden != c.hidden || m.barrier != 7 {
			t.Errorf("hidden %v behind transaction %d, %v; want %v behind 7", hidden, m.barrier, err, c.hidden)
		}
	}
}

// If another program moves the idle slot, or creates one, the commits that it has passed may not be visible. A move by
// a stream or by the relay itself is expected.
func TestTheSlotIsMovedBySomebodyElse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		phase         phase
		before, after outbox.SlotStatus
		own           bool
		want          bool
	}{
		"moved": {
			phase: phasePoll, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 6}, want: true,
		},
		"made":    {phase: phaseSweep, after: outbox.SlotStatus{Exists: true, Confirmed: 6}, want: true},
		"dropped": {phase: phaseSweep, before: outbox.SlotStatus{Exists: true, Confirmed: 5}},
		"moved beside an adoption": {
			phase: phaseAdopt, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 6}, want: true,
		},
		"moved by us": {
			phase: phaseSweep, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 100}, own: true,
		},
		"moved in a hand-over": {
			phase: phaseHandover, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 6}, want: true,
		},
		"and moved by us": {
			phase: phaseHandover, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 100}, own: true,
		},
		"streamed": {
			phase: phaseStream, before: outbox.SlotStatus{Exists: true, Confirmed: 5},
			after: outbox.SlotStatus{Exists: true, Confirmed: 6},
		},
		"by a stream that ended": {phase: phasePoll, before: outbox.SlotStatus{
			Exists: true, Active: true,
			Confirmed: 5,
		}, after: outbox.SlotStatus{Exists: true, Confirmed: 6}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &transactions{status: c.before}
			r := New(Options{Store: m, Slots: m})
			k := r.keeper
			r.activity.phase = c.phase
			k.streams(c.phase == phaseStream)
			if _, err := k.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			if c.own {
				if err := k.shortcut(t.Context(), 100, 7); err != nil {
					t.Fatal(err)
				}
			}
			m.status = c.after
			if _, err := k.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			if (m.barrier == outbox.BarrierUnknown) != c.want {
				t.Errorf("barrier %d, want one: %v", m.barrier, c.want)
			}
		})
	}
}
