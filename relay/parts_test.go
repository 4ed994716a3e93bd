package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
)

// ordered is an event of an aggregate.
func ordered(seq int64, aggregate string) *outbox.Record {
	return &outbox.Record{ID: uuid.New(), Seq: seq, AggregateType: "order", AggregateID: aggregate}
}

// listing returns the parked events to a refresh.
func listing(list ...*outbox.Record) func() ([]outbox.Dead, error) {
	return func() (dead []outbox.Dead, _ error) {
		for _, e := range list {
			dead = append(dead, outbox.Dead{
				ID: e.ID, Seq: e.Seq, AggregateType: e.AggregateType, AggregateID: e.AggregateID,
			})
		}
		return dead, nil
	}
}

func TestBlocksKeepTheOrderOfAnAggregate(t *testing.T) {
	t.Parallel()
	var none *blocks
	if none.blocker(&outbox.Record{AggregateID: "a"}) != "" {
		t.Error("without block-key something is blocked")
	}
	b := newBlocks()
	blocked := func(what string, e *outbox.Record, by string) {
		t.Helper()
		if got := b.blocker(e); got != by {
			t.Errorf("%s: blocked by %q, want %q", what, got, by)
		}
	}
	first, second := ordered(1, "a"), ordered(2, "a")
	b.add(first)
	blocked("the event behind a parked one", second, first.ID.String())
	blocked("another aggregate", ordered(3, "b"), "")
	b.add(second)
	// A retry gives the first event a new number; its place stays the first.
	again, retried, parked := *first, *second, *second
	again.Seq, retried.Seq = 10, 11
	blocked("the retried second event", &retried, first.ID.String())
	blocked("the retried first event", &again, "")
	blocked("the second event, retried behind the first", &retried, "")
	if b.blocker(ordered(9, "a")) == "" {
		t.Error("an event before the retried rows overtakes them")
	}
	b.add(&again)
	blocked("the retried second event, the first being parked again", &retried, first.ID.String())
	if err := b.refresh(listing(&parked)); err != nil { // the first is published
		t.Fatal(err)
	}
	blocked("the retried second event, though the first is gone", &retried, "")
}

// A retried event that has to wait again stays in front of the events behind its new row.
func TestBlocksHoldWhatWaitsBehindARetry(t *testing.T) {
	t.Parallel()
	b := newBlocks()
	first, second := ordered(1, "a"), ordered(2, "a")
	b.add(first)
	b.add(second)
	second.Seq, first.Seq = 10, 11 // retried in the wrong order
	want := []string{first.ID.String(), "", second.ID.String()}
	if got := b.blockers([]*outbox.Record{second, first, ordered(12, "a")}); !slices.Equal(got, want) {
		t.Errorf("blocked by %q, want %q", got, want)
	}
}

// A refresh keeps an event that is parked while the list of parked events is being read, also if another one begins
// meanwhile.
func TestBlocksRefreshKeepsWhatIsParkedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, another := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b, parked, behind := newBlocks(), ordered(1, "a"), ordered(2, "a")
			err := b.refresh(func() ([]outbox.Dead, error) {
				b.add(parked)
				if another {
					go func() { _ = b.refresh(listing(parked)) }()
					synctest.Wait()
				}
				return nil, nil // the list is older than the parking
			})
			synctest.Wait()
			if got := b.blocker(behind); err != nil || got != parked.ID.String() {
				t.Errorf("another %v: blocked by %q, want %s; %v", another, got, parked.ID, err)
			}
			failure := errors.New("postgres is gone")
			if err := b.refresh(func() ([]outbox.Dead, error) { return nil, failure }); !errors.Is(err, failure) {
				t.Errorf("got %v", err)
			}
			if b.blocker(behind) == "" {
				t.Error("a failed refresh forgot what was known")
			}
		})
	}
}

func TestReasonsOfErrors(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		outbox.ReasonStop: nil, outbox.ReasonGap: fmt.Errorf("publish: %w", outbox.ErrGap),
		outbox.ReasonFenced:     fmt.Errorf("x: %w", &outbox.FencedError{}),
		outbox.ReasonBudget:     fmt.Errorf("x: %w", &outbox.SlotError{Reason: outbox.ReasonBudget}),
		outbox.ReasonRestarted:  fmt.Errorf("x: %w", outbox.ErrMoved),
		outbox.ReasonConnection: errors.New("anything"),
	} {
		if got := slotReason(err); got != want {
			t.Errorf("%v: got %s, want %s", err, got, want)
		}
	}
	if got := slotReason(fmt.Errorf("x: %w", outbox.ErrSuperseded)); got != outbox.ReasonFenced {
		t.Errorf("superseded: %s", got)
	}
}

// A stream is noted before its gate is raised, and gets an H of its own after that. It is ready when all of that has
// succeeded: a failure in between must not be taken for success the next time.
func TestGatesNoteBeforeTheyAdopt(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		failure, fresh := errors.New("postgres hiccups"), 0
		r.gates.fresh = func(context.Context) error {
			if fresh++; fresh == 1 {
				return failure
			}
			return nil
		}
		r.plan = fault{"Sink.Adopt", 0, refused}
		for _, want := range []error{errRefused, failure, nil, nil} {
			if err := r.gates.Ensure(r.intake, "outbox.order"); !errors.Is(err, want) {
				t.Errorf("got %v, want %v", err, want)
			}
			if ready := slices.Contains(r.gates.streams(), "outbox.order"); ready != (want == nil) {
				t.Errorf("after %v: it is ready: %v", want, ready)
			}
		}
		want := []string{
			"Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt",
			"Store.Streams", "Store.NoteStream", "Sink.Look", "Sink.Adopt", "Store.Gated",
			"Store.Streams", "Store.NoteStream", "Sink.Adopt",
		}
		if got := r.calls(0, "FAULT "+r.plan.String()); !slices.Equal(got, want) || fresh != 2 {
			t.Errorf("calls %v, want %v; asked %d times for H, want 2", got, want, fresh)
		}
	})
}

// A new stream of a type with other streams gets their groups before it is noted. A stream that is already noted is
// left as it is: it has the groups, or an operator has dropped them.
func TestANewStreamOfATypeGetsItsGroups(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.pg.streams = []outbox.Stream{
			{Name: "outbox.order", Base: "outbox.order"},
			{Name: "outbox.order.1", Base: "outbox.order"},
			{Name: "outbox.user", Base: "outbox.user"},
		}
		r.gates.layout.Shards = 4
		sink := &regrouped{Sink: r.gates.sink}
		r.gates.sink = sink
		for _, stream := range []string{"outbox.order.3", "outbox.order.1", "outbox.late.2", "outbox.order.3"} {
			if err := r.gates.Ensure(r.intake, stream); err != nil {
				t.Fatal(err)
			}
		}
		if want := []string{"outbox.order.3 outbox.order outbox.order.1"}; !slices.Equal(sink.followed, want) {
			t.Errorf("followed %q, want %q", sink.followed, want)
		}
	})
}

// regrouped records which streams got the groups of which others.
type regrouped struct {
	stream.Sink
	followed []string
}

func (f *regrouped) Follow(ctx context.Context, stream string, others []string) error {
	f.followed = append(f.followed, stream+" "+strings.Join(others, " "))
	return f.Sink.Follow(ctx, stream, others)
}

// The stream of another type is never made ready, even if its gate was raised. Other streams are unaffected.
func TestAStreamOfAnotherTypeIsNotReady(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		known := outbox.Stream{Name: "outbox.order.1", Base: "outbox.order"}
		r.pg.streams = []outbox.Stream{known}
		if err := r.gates.adopt(r.intake, known, false); err != nil {
			t.Fatal(err)
		}
		r.gates.ready(known)
		for range 2 {
			err := r.gates.Ensure(r.intake, known.Name)
			if taken := (*outbox.TakenError)(nil); !errors.As(err, &taken) || taken.Base != known.Base {
				t.Errorf("the stream of another type: %v", err)
			}
		}
		if err := r.gates.Ensure(r.intake, "outbox.order.2"); err != nil {
			t.Error(err)
		}
	})
}
