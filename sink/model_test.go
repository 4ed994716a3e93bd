package sink_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sink/sinktest"
)

// faults loses calls on their way to the server (nothing happens) or replies on their way back (it happened). hold
// keeps the next calls in held instead of sending them.
type faults struct {
	before, after, hold atomic.Int32
	held                [][]any
}

func (h *faults) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *faults) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h *faults) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if name := cmd.Name(); name != "evalsha" && name != "eval" {
			return next(ctx, cmd)
		}
		if h.hold.Add(-1) >= 0 {
			var held []any
			for _, a := range cmd.Args() {
				if b, ok := a.([]byte); ok {
					a = bytes.Clone(b) // the lane uses its buffer again
				}
				held = append(held, a)
			}
			h.held = append(h.held, held)
			return io.EOF
		}
		if h.before.Add(-1) >= 0 {
			return io.EOF
		}
		err := next(ctx, cmd)
		if err == nil && h.after.Add(-1) >= 0 {
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

// row is an event in the table of the model. It is handed to a lane once; a new owner or claim gets it again.
type row struct {
	event     *outbox.Record
	part      int
	taken     bool
	published bool
}

// open is a lane of the model.
type open struct {
	lane outbox.Lane
	l    outbox.LanePublisher
	// unsettled are the rows handed over and not deleted, by batch.
	unsettled []delivered
	// stuck is a delivery that was given up half-way, so that the lane cannot be used any more.
	stuck bool
}

type delivered struct {
	number int64
	rows   []*row
}

// world is the model: a table, a relay that owns the gate, and the oracle.
type world struct {
	f     *fixture
	h     *faults
	owner outbox.Owner
	// zombie is the owner before, still publishing.
	zombie outbox.LanePublisher
	// polling says that parts are swept; otherwise the stream lane is used.
	polling bool
	stream  *open
	parts   map[int]*open
	claim   int64
	table   []*row
	// alone and shared are the sink in both forms, of which every adoption takes one; other is that of another
	// database, which, if joined, has published to the stream.
	alone, shared, other *sink.Sink
	otherEpoch           int64
	joined               bool
	// gone are the ids of settled events since the last flush: they too are in the stream once.
	gone    []uuid.UUID
	flushed bool
}

func (w *world) ctx() context.Context { return w.f.Context() }

// adopt is a new leadership, in either mode.
func (w *world) adopt(t *rapid.T) {
	if w.stream != nil {
		w.zombie = w.stream.l
	}
	w.owner = outbox.Owner{Source: w.owner.Source, Epoch: w.owner.Epoch + 1, Nonce: nonce()}
	w.lose(t)
	if w.f.sink = w.shared; !w.joined && rapid.Bool().Draw(t, "alone") {
		w.f.sink = w.alone
	}
	adopt := func() error { return w.f.sink.Adopt(w.ctx(), stream, w.owner, false) }
	for err := adopt(); err != nil; err = adopt() {
		if sink.Class(err) != "connection" { // asked again until it is heard
			t.Fatalf("adopt: %v", err)
		}
	}
	w.polling = rapid.Bool().Draw(t, "polling")
	w.stream, w.parts = w.open(streamLane(w.owner)), map[int]*open{}
	for _, r := range w.table {
		r.taken = false
	}
	w.flushed = false
}

// lose arms the faults.
func (w *world) lose(t *rapid.T) {
	w.h.before.Store(rapid.Int32Range(0, 3).Draw(t, "calls lost"))
	w.h.after.Store(rapid.Int32Range(0, 3).Draw(t, "replies lost"))
}

func (w *world) calm() {
	w.h.before.Store(0)
	w.h.after.Store(0)
}

func (w *world) write(t *rapid.T) {
	for _, e := range makeEvents(rapid.IntRange(1, 5).Draw(t, "events")) {
		w.table = append(w.table, &row{event: e, part: rapid.IntRange(0, 2).Draw(t, "part")})
	}
}

// target returns the lane to publish on. In poll mode it claims a part again if its lane is stuck, or at random.
func (w *world) target(t *rapid.T) (*open, func(*row) bool) {
	if !w.polling {
		return w.stream, func(*row) bool { return true }
	}
	part := rapid.IntRange(0, 2).Draw(t, "part")
	return w.part(part, rapid.IntRange(0, 3).Draw(t, "claim") == 0), func(r *row) bool { return r.part == part }
}

// part returns the lane of a part. If it is claimed again, the rows of the earlier claim are unsettled again.
func (w *world) part(part int, again bool) *open {
	if o := w.parts[part]; o != nil && !o.stuck && !again {
		return o
	}
	w.claim++
	for _, r := range w.table {
		r.taken = r.taken && r.part != part
	}
	w.parts[part] = w.open(outbox.Lane{Part: part, Claim: w.claim, Nonce: nonce()})
	return w.parts[part]
}

func (w *world) open(l outbox.Lane) *open {
	return &open{lane: l, l: w.f.sink.Lane(stream, w.owner, l)}
}

// publish passes the oldest unsettled rows to a lane, with faults.
func (w *world) publish(t *rapid.T) {
	o, mine := w.target(t)
	if o.stuck {
		t.Skip("the lane waits for an adoption")
	}
	w.lose(t)
	tries := rapid.IntRange(1, 8).Draw(t, "tries")
	w.deliver(t, o, mine, rapid.IntRange(1, 8).Draw(t, "rows"), tries)
}

func (w *world) deliver(t *rapid.T, o *open, mine func(*row) bool, most, tries int) {
	var rows []*row
	var events []*outbox.Record
	for _, r := range w.table {
		if !r.taken && mine(r) && len(rows) < most {
			rows, events = append(rows, r), append(events, r.event)
		}
	}
	if len(rows) == 0 {
		return
	}
	for _, r := range rows {
		r.taken = true
	}
	d := o.l.Deliver(events)
	for range tries {
		receipt, err := d.Publish(w.ctx())
		switch {
		case err == nil:
			w.accept(t, o, rows, receipt)
			return
		case errors.Is(err, outbox.ErrGap):
			if !w.flushed {
				t.Fatalf("a gap, and nothing was flushed: %v", err)
			}
			w.calm()
			w.adopt(t)
			return
		case sink.Class(err) != "connection":
			t.Fatalf("class %q of %v", sink.Class(err), err)
		}
	}
	o.stuck = true
}

func (w *world) accept(t *rapid.T, o *open, rows []*row, receipt outbox.Receipt) {
	if w.flushed {
		t.Fatal("published over a flushed gate without an adoption")
	}
	for _, r := range rows {
		r.published = true
	}
	o.unsettled = append(o.unsettled, delivered{number: receipt.Number, rows: rows})
}

// settle deletes the rows of one lane's oldest batches; the gate hears of it, late or not at all.
func (w *world) settle(t *rapid.T) {
	w.calm()
	lanes := []*open{w.stream}
	for _, o := range w.parts {
		lanes = append(lanes, o)
	}
	slices.SortFunc(lanes, func(a, b *open) int { return a.lane.Part - b.lane.Part })
	o := lanes[rapid.IntRange(0, len(lanes)-1).Draw(t, "lane")]
	if len(o.unsettled) == 0 {
		return
	}
	n := rapid.IntRange(1, len(o.unsettled)).Draw(t, "batches")
	mark := []outbox.Mark{{Stream: stream, Lane: o.lane, Number: o.unsettled[n-1].number}}
	if err := w.f.sink.Confirm(w.ctx(), w.owner, mark); err != nil {
		if !w.flushed || !errors.Is(err, outbox.ErrGap) {
			t.Fatalf("confirm: %v", err)
		}
		w.adopt(t)
		return
	}
	if w.flushed {
		t.Fatal("confirmed what was flushed")
	}
	for _, b := range o.unsettled[:n] {
		for _, r := range b.rows {
			w.gone = append(w.gone, r.event.ID)
			w.table = slices.DeleteFunc(w.table, func(x *row) bool { return x == r })
		}
	}
	o.unsettled = o.unsettled[n:]
	switch rapid.IntRange(0, 2).Draw(t, "told") {
	case 0:
		o.l.Settled(mark[0].Number)
	case 1:
		if err := w.f.sink.Settled(w.ctx(), w.owner, mark); err != nil {
			t.Fatalf("settled: %v", err)
		}
	}
}

// flush deletes everything in Redis. Without a barrier settled events are lost; the others are unsettled again.
func (w *world) flush(t *rapid.T) {
	if rapid.IntRange(0, 4).Draw(t, "really") > 0 {
		t.Skip("not this time")
	}
	w.f.do("FLUSHALL")
	w.gone, w.flushed = nil, true
	for _, r := range w.table {
		r.published = false
	}
}

// undead publishes for the previous owner.
func (w *world) undead(t *rapid.T) {
	if w.zombie == nil {
		t.Skip("no zombie")
	}
	w.calm()
	_, err := w.zombie.Deliver(makeEvents(1)).Publish(w.ctx())
	if err == nil {
		t.Fatal("a zombie published")
	}
	w.zombie = nil
}

// join has another database publish, which it may if the stream is shared.
func (w *world) join(t *rapid.T) {
	if w.f.sink == w.alone && w.flushed {
		t.Skip("whoever comes first has the stream")
	}
	w.otherEpoch++
	o := outbox.Owner{Source: [16]byte{8}, Epoch: w.otherEpoch, Nonce: nonce()}
	err := w.other.Adopt(w.ctx(), stream, o, false)
	if foreign := sink.Class(err) == "foreign"; foreign || w.f.sink == w.alone {
		if !foreign || w.f.sink != w.alone {
			t.Fatalf("another database adopts a stream, shared %v: %v", w.f.sink == w.shared, err)
		}
		return
	}
	if err == nil {
		_, err = w.other.Lane(stream, o, streamLane(o)).Deliver(makeEvents(2)).Publish(w.ctx())
	}
	if err != nil {
		t.Fatalf("another database publishes: %v", err)
	}
	w.joined = true
}

// leave has the other database leave.
func (w *world) leave(t *rapid.T) {
	if _, err := sink.Leave(w.ctx(), w.f.server.Client, stream, "/posthaste/other"); err != nil {
		t.Fatal(err)
	}
	w.joined = false
}

// drain publishes and settles everything, so that the doubt may be emptied.
func (w *world) drain(t *rapid.T) {
	w.calm()
	if w.flushed || w.stream.stuck && !w.polling {
		w.adopt(t)
		w.calm()
	}
	if !w.polling {
		w.deliver(t, w.stream, func(*row) bool { return true }, 1<<20, 1)
	}
	for part := range 3 {
		if w.polling {
			w.deliver(t, w.part(part, false), func(r *row) bool { return r.part == part }, 1<<20, 1)
		}
	}
	for _, r := range w.table {
		if !r.published {
			t.Fatalf("event %s is not published", r.event.ID)
		}
	}
	if err := w.f.sink.ForgetDoubt(w.ctx(), w.owner, stream); err != nil {
		t.Fatalf("forget: %v", err)
	}
}

// check is the oracle: no event is in the stream twice, and every event known to be published is there.
func (w *world) check(t *rapid.T) {
	seen := map[uuid.UUID]bool{}
	for _, id := range w.f.stored(stream) {
		if seen[id] {
			t.Fatalf("event %s is in the stream twice", id)
		}
		seen[id] = true
	}
	for _, id := range w.gone {
		if !seen[id] {
			t.Fatalf("settled event %s is not in the stream", id)
		}
	}
	for _, r := range w.table {
		if r.published && !seen[r.event.ID] {
			t.Fatalf("published event %s is not in the stream", r.event.ID)
		}
	}
}

// TestModel also changes, at every adoption, whether the stream is shared, and has another database share it.
func TestModel(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t, "appendonly no")
	rapid.Check(t, func(rt *rapid.T) {
		c, err := sink.NewClient(server.URL())
		if err != nil {
			rt.Fatal(err)
		}
		defer c.Close()
		h := &faults{}
		c.AddHook(h)
		s, _ := newSink(t, c, sink.Options{})
		again, _ := newSink(t, c, sink.Options{Shared: true})
		other, _ := newSink(t, server.Client, sink.Options{Shared: true, Source: "/posthaste/other"})
		w := &world{
			alone: s, shared: again, other: other,
			f: &fixture{Fixture: sinktest.Fixture{TB: t}, server: server, client: c, sink: s}, h: h,
			owner: outbox.Owner{Source: [16]byte{7}},
		}
		w.f.do("FLUSHALL")
		w.adopt(rt)
		rt.Repeat(map[string]func(*rapid.T){
			"write":   w.write,
			"publish": w.publish,
			"settle":  w.settle,
			"adopt":   func(t *rapid.T) { w.adopt(t); w.calm() },
			"flush":   w.flush,
			"undead":  w.undead,
			"join":    w.join,
			"leave":   w.leave,
			"scripts": func(*rapid.T) { w.f.do("SCRIPT", "FLUSH") },
			"drain":   w.drain,
			"":        w.check,
		})
		w.drain(rt)
		w.check(rt)
	})
}
