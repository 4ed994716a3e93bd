package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"posthaste/outbox"
)

const (
	// markInterval is how often the mark is moved, markGap the least time between two looks.
	markInterval = time.Second
	markGap      = 50 * time.Millisecond
	// lookShare is how many times longer than looking the settler does something else, for lookPause at most.
	lookShare = 10
	lookPause = 5 * time.Second
)

// settler confirms what was published, moves the mark behind it, and tells everybody concerned. One goroutine owns it.
//
// A mark moves on evidence: it comes to see a transaction when each of its rows, as a look finds them, was published or
// parked, and confirmed. What a look finds and the stream has passed without delivering it, the stream has missed.
type settler struct {
	*reporter
	store  outbox.Store
	sink   outbox.Sink
	source outbox.Source
	owner  outbox.Owner
	window *window
	lanes  *lanes
	// passed is the position up to which everything is published, and in a flight.
	passed func() outbox.LSN

	flights <-chan *flight
	// begun gets, before the first flight, what is settled and up to where the WAL may be old.
	begun chan outbox.Pass

	// mark is the mark of every part, as far as is known; least is what the next one has to reach: an attempt, of which
	// nobody knows what has become, did.
	mark  outbox.Settled
	least uint64
	// rows are those that were published or parked and that mark does not hold, by transaction. highest is the highest
	// of these that ever was.
	rows    map[uint64][]int64
	highest uint64
	entries outbox.Entries
	// pending are the flights, in their order, that are not settled, and unconfirmed what is to be confirmed of them.
	pending     []*flight
	unconfirmed []outbox.Mark
	// apart is Options.Apart. late counts the rows of each transaction that are not published, although those behind
	// them are, and stuck are the streams that could not be confirmed when they were last asked: what is neither is
	// settled without them.
	apart bool
	late  map[uint64]int
	stuck map[string]bool

	marker outbox.Marker // nil: none is open
	last   outbox.Pass   // of the last look, whichever marker's
	// suspects are what a look of this marker found and the stream had not delivered; it has to have done so at their
	// End.
	suspects outbox.Look
	// looked is when the last look began, took what it took.
	looked time.Time
	took   time.Duration
	// hurried is set when somebody waits for the mark to move.
	hurried bool
	// troubled is since when settling fails; zero if it does not.
	troubled time.Time
	bo       backoff
}

// begin names what is settled when the stream begins, and H as its end. It is called once, before the first flight.
func (s *settler) begin(at outbox.Pass) { s.begun <- at }

// run settles what was published, behind the publisher, until there is no more. While the intake lasts it repeats
// what fails; afterwards the first failure ends it, because what is not settled becomes doubt.
func (s *settler) run(sp span, fail func(error)) error {
	err := s.follow(sp)
	s.drop()
	if err != nil {
		fail(err)             // first: only that ends the publisher, whose end the next line waits for
		for range s.flights { //nolint:revive // let the publisher come to its end
		}
	}
	return err
}

func (s *settler) follow(sp span) error {
	select {
	case at := <-s.begun:
		s.start(at)
	case f, ok := <-s.flights:
		if !ok {
			return nil // it never began
		}
		s.start(<-s.begun)
		s.take(f)
	}
	for flights := s.flights; flights != nil || s.open(); {
		wait := time.Until(s.due(flights == nil))
		if wait <= 0 {
			if err := s.advance(sp); err != nil {
				return err
			}
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case f, ok := <-flights:
			if ok {
				s.take(f)
			} else {
				flights = nil
				s.giveUp()
			}
		case <-s.window.pressed:
			s.hurried = true
		case <-timer.C:
		case <-sp.work.Done():
			return context.Cause(sp.work)
		}
		timer.Stop()
	}
	return nil
}

func (s *settler) start(at outbox.Pass) {
	s.mark, s.least, s.highest = at.Settled, at.Snapshot.Max(), at.Snapshot.Max()
	s.rows, s.entries, s.late = map[uint64][]int64{}, outbox.Entries{}, map[uint64]int{}
	s.last = at
	s.looked, s.bo = time.Now(), backoff{first: 20 * time.Millisecond, most: time.Second}
}

// due is when to look next.
func (s *settler) due(last bool) time.Time {
	rest := lookShare * s.took
	wait := max(markInterval, min(rest, lookPause))
	switch {
	case last, !s.troubled.IsZero() && len(s.stuck) == 0:
		wait = markGap
	case s.hurried, s.window.halfFull(): // a look that took long must not hold up the stream for longer
		wait = max(markGap, min(rest, markInterval))
	}
	return s.looked.Add(wait)
}

// take notes a flight, and those that wait behind it.
func (s *settler) take(f *flight) {
	s.note(f)
	for range len(s.flights) {
		s.note(<-s.flights)
	}
	s.release()
}

// confirm repeats until what was published is as durable as is asked for. Where streams live apart it asks once, and
// those that do not answer are stuck.
func (s *settler) confirm(sp span) error {
	for len(s.unconfirmed) > 0 {
		err := s.ask(sp)
		if err == nil {
			s.bo.reset()
			return nil
		}
		if err := s.failed(sp, "confirm", err); err != nil || s.apart {
			return err
		}
	}
	s.stuck = nil
	return nil
}

// ask asks for all, but for what is stuck stream by stream; and when all have not answered, too.
func (s *settler) ask(sp span) error {
	var together, alone []outbox.Mark
	for _, m := range s.unconfirmed {
		if s.stuck[m.Stream] {
			alone = append(alone, m)
		} else {
			together = append(together, m)
		}
	}
	var err error
	if len(together) > 0 {
		err = s.confirmed(sp, together)
	}
	if !s.apart || err != nil && finished(err) {
		if err == nil {
			s.unconfirmed = nil
		}
		return err
	}
	if err != nil {
		alone = s.unconfirmed
	}
	errs := make([]error, len(alone))
	var wg sync.WaitGroup
	for i, m := range alone {
		wg.Go(func() { errs[i] = s.confirmed(sp, []outbox.Mark{m}) })
	}
	wg.Wait()
	s.unconfirmed, s.stuck, err = nil, nil, nil
	for i, m := range alone {
		if errs[i] == nil {
			continue
		}
		if s.stuck == nil {
			s.stuck = map[string]bool{}
		}
		s.unconfirmed, s.stuck[m.Stream] = append(s.unconfirmed, m), true
		if err == nil || finished(errs[i]) {
			err = errs[i]
		}
	}
	return err
}

func (s *settler) confirmed(sp span, marks []outbox.Mark) error {
	ctx, cancel := context.WithTimeout(sp.work, 2*publishTimeout)
	defer cancel()
	return s.sink.Confirm(ctx, s.owner, marks)
}

// open reports whether there is something to settle.
func (s *settler) open() bool {
	return slices.ContainsFunc(s.pending, func(f *flight) bool { return !f.never && !f.spent() })
}

// giveUp takes leave of what is late: nobody will publish it any more.
func (s *settler) giveUp() {
	for _, f := range s.pending {
		f.never, f.late = f.late, false
	}
}

// note adds the rows of a flight to those that no mark holds.
func (s *settler) note(f *flight) {
	switch {
	case f.landed != nil:
		f.landed.entries, f.landed.marks, f.landed.published = f.entries, f.marks, f.published
		f = f.landed
		f.late = false
		for _, xid := range f.behind {
			if s.late[xid]--; s.late[xid] == 0 {
				delete(s.late, xid)
			}
		}
		f.behind = nil
	case f.late:
		for _, r := range f.rows {
			xid := s.last.Snapshot.Widen(r.xid)
			s.late[xid]++
			f.behind = append(f.behind, xid)
		}
		s.pending = append(s.pending, f)
		return
	default:
		s.pending = append(s.pending, f)
	}
	for _, r := range f.rows {
		xid := s.last.Snapshot.Widen(r.xid)
		if s.mark.Snapshot.Sees(xid) {
			continue // it was deleted while it was on its way
		}
		s.rows[xid] = append(s.rows[xid], r.seq)
		s.highest = max(s.highest, xid)
		if n := len(f.owed); n == 0 || f.owed[n-1].xid != xid {
			f.owed = append(f.owed, share{xid: xid})
		}
		last := &f.owed[len(f.owed)-1]
		last.events, last.bytes = last.events+1, last.bytes+r.size
	}
	f.rows = nil
	for stream, id := range f.entries {
		s.entries.Raise(stream, id)
	}
	s.unconfirmed = lastMarks(append(s.unconfirmed, f.marks...))
}

// advance confirms what was published, looks, and moves the mark to what is published of what it sees. It confirms just
// before: what Redis forgets between the two is lost, and from before it is published again.
func (s *settler) advance(sp span) error {
	s.hurried = false
	passed := s.passed()
	if len(s.flights) > 0 { // among them what was published up to there
		s.take(<-s.flights)
	}
	if err := s.confirm(sp); err != nil {
		return err
	}
	if err := s.missed(passed); err != nil {
		s.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed).Inc()
		return err
	}
	step, err := s.move(sp.work, passed)
	if err != nil {
		s.drop()
		return s.failed(sp, step, err)
	}
	if len(s.stuck) > 0 {
		return nil
	}
	s.bo.reset()
	s.troubled = time.Time{}
	if s.health.clear(conditionSettle) {
		s.log.Info("settling again")
	}
	return nil
}

// missed reports a row that the stream has passed without delivering it.
func (s *settler) missed(passed outbox.LSN) error {
	if passed < s.suspects.End {
		return nil
	}
	suspects := s.suspects
	s.suspects = outbox.Look{}
	for _, o := range suspects.Owed {
		if !s.mark.Snapshot.Sees(o.XID) && !s.complete(o) && s.late[o.XID] == 0 {
			return &outbox.SlotError{
				Reason: outbox.ReasonMissed,
				Err: fmt.Errorf("the stream passed %s without delivering a row of transaction %d", suspects.End,
					o.XID),
				Remedy: "check that the publication has the outbox table and that no other program moves the slot; " +
					"events are swept meanwhile",
			}
		}
	}
	return nil
}

// complete reports whether all rows of a transaction were published, as far as a look has found them.
func (s *settler) complete(o outbox.Owed) bool {
	rows := s.rows[o.XID]
	if len(rows) < len(o.Seqs) {
		return false
	}
	slices.Sort(rows)
	for _, seq := range o.Seqs {
		if _, there := slices.BinarySearch(rows, seq); !there {
			return false
		}
	}
	return true
}

// move looks once, and moves the mark if there is something to settle. An error comes with the step that failed.
func (s *settler) move(ctx context.Context, passed outbox.LSN) (step string, err error) {
	call := func(name string, make func(ctx context.Context) error) error {
		step = name
		actx, cancel := context.WithTimeout(ctx, 2*publishTimeout)
		defer cancel()
		return make(actx)
	}
	if s.marker == nil {
		err = call("open", func(ctx context.Context) (err error) {
			s.marker, err = s.store.Marker(ctx)
			return err
		})
		if err != nil {
			return step, err
		}
	}
	// What is far behind in the WAL is not looked at before it is published.
	below := uint64(math.MaxInt64)
	if passed < s.last.End {
		below = max(s.highest+1, s.least)
	}
	var look outbox.Look
	s.looked = time.Now()
	err = call("look", func(ctx context.Context) (err error) {
		look, err = s.marker.Look(ctx, s.mark, below)
		return err
	})
	if s.took = time.Since(s.looked); err != nil {
		return step, err
	}
	s.last = look.Pass
	to, news := s.reach(look, below)
	if !news {
		return "", nil
	}
	s.least = max(s.least, to.Snapshot.Max())
	err = call("move", func(ctx context.Context) error { return s.marker.Move(ctx, s.owner, to, s.entries) })
	if err != nil {
		return step, err
	}
	s.mark, s.entries = to, outbox.Entries{}
	for xid := range s.rows {
		if to.Snapshot.Sees(xid) {
			delete(s.rows, xid)
		}
	}
	s.release()
	return "", nil
}

// reach is how far the mark may be moved after a look, and whether that settles something. It sees what it saw, nothing
// that the look does not see, and no transaction of which a row is not published.
func (s *settler) reach(look outbox.Look, below uint64) (to outbox.Settled, news bool) {
	unsure := s.unsure()
	undone := slices.DeleteFunc(look.Owed, func(o outbox.Owed) bool { return !unsure[o.XID] && s.complete(o) })
	if len(s.suspects.Owed) == 0 {
		s.suspects = outbox.Look{Pass: look.Pass, Owed: undone}
	}
	hidden := slices.Clone(look.Snapshot.Running())
	for _, o := range undone {
		hidden = append(hidden, o.XID)
	}
	seen := outbox.NewSnapshot(min(look.Snapshot.Max(), below), hidden)
	top := s.least
	for xid := range s.rows {
		if seen.Sees(xid) {
			news, top = true, max(top, xid+1)
		}
	}
	if len(undone) == 0 {
		top = max(top, seen.Max())
	}
	return outbox.Settled{
		Snapshot: outbox.NewSnapshot(min(top, look.Snapshot.Max()), hidden), High: max(s.mark.High, look.High),
	}, news
}

// unsure are the transactions of which something is in a stream that is stuck.
func (s *settler) unsure() map[uint64]bool {
	if len(s.stuck) == 0 {
		return nil
	}
	xids := map[uint64]bool{}
	for _, f := range s.pending {
		if slices.ContainsFunc(f.marks, func(m outbox.Mark) bool { return s.stuck[m.Stream] }) {
			for _, o := range f.owed {
				xids[o.xid] = true
			}
		}
	}
	return xids
}

// release tells everybody concerned which flights are settled: only from the first one on without a gap. Around what is
// late or stuck the window is released; the slot, and a stream of which something is not settled, wait all the same.
func (s *settler) release() {
	var end outbox.LSN
	rows, events, bytes := 0, 0, 0
	var marks []outbox.Mark
	var kept []*flight
	waiting := map[string]bool{}
	around := len(s.late)+len(s.stuck) > 0
	for i, f := range s.pending {
		f.owed = slices.DeleteFunc(f.owed, func(o share) bool {
			seen := s.mark.Snapshot.Sees(o.xid)
			if seen && around {
				events, bytes = events+o.events, bytes+o.bytes
				f.events, f.bytes = f.events-o.events, f.bytes-o.bytes
			}
			return seen
		})
		if f.late || f.never || len(f.owed) > 0 {
			if !around {
				kept = s.pending[i:]
				break
			}
			for _, m := range f.marks {
				waiting[m.Stream] = true
			}
			kept = append(kept, f)
			continue
		}
		rows, events, bytes = rows+f.published, events+f.events, bytes+f.bytes
		f.published, f.events, f.bytes = 0, 0, 0
		rest := f.marks[:0]
		for _, m := range f.marks {
			if waiting[m.Stream] {
				rest = append(rest, m)
			} else {
				marks = append(marks, m)
			}
		}
		f.marks = rest
		if len(kept) == 0 {
			end = max(end, f.end)
		} else if last := kept[len(kept)-1]; last.spent() {
			last.end, last.marks = max(last.end, f.end), lastMarks(append(last.marks, f.marks...))
		} else {
			kept = append(kept, f)
		}
	}
	s.pending = kept
	if len(marks) > 0 {
		s.lanes.settled(lastMarks(marks))
	}
	if rows > 0 {
		s.settled(rows)
	}
	if end != 0 {
		s.source.Settled(end)
	}
	if events > 0 {
		s.window.release(events, bytes)
	}
}

// failed notes that a step has failed, and waits a little. An error says that it is not to be repeated.
func (s *settler) failed(sp span, step string, err error) error {
	if finished(err) || errors.Is(err, outbox.ErrSuperseded) || sp.intake.Err() != nil || sp.work.Err() != nil {
		return wrap(step, err)
	}
	if s.troubled.IsZero() {
		s.troubled = time.Now()
	}
	s.log.Debug("settling is repeated", "step", step, "err", err)
	if time.Since(s.troubled) > patience && s.health.fail(conditionSettle, step+": "+err.Error()) {
		s.log.Warn("published events cannot be settled; retrying", "step", step, "err", err)
	}
	s.bo.wait(sp.intake)
	return nil
}

// drop gives the marker up. What it has seen means nothing to another one.
func (s *settler) drop() {
	if s.marker != nil {
		s.marker.Close()
	}
	s.marker, s.suspects = nil, outbox.Look{}
	// It may be long until the next one looks: nobody knows how far behind the stream is then.
	s.last.End = math.MaxUint64
}

// lastMarks keeps the highest number of each stream.
func lastMarks(marks []outbox.Mark) []outbox.Mark {
	at := map[string]int{}
	var out []outbox.Mark
	for _, m := range marks {
		if i, ok := at[m.Stream]; ok {
			out[i].Number = max(out[i].Number, m.Number)
			continue
		}
		at[m.Stream] = len(out)
		out = append(out, m)
	}
	return out
}
