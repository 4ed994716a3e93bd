package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// markInterval is how often the mark is moved, markGap the least time between two looks.
	markInterval = time.Second
	markGap      = 50 * time.Millisecond
	// lookShare is how many times longer than looking the settler does something else, for lookPause at most.
	lookShare = 10
	lookPause = 5 * time.Second
	// askPause is how long others wait for a stream that is asked alone, and the least time between two such questions.
	askPause = time.Second
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
	// them are, and stuck are the streams that could not be confirmed when they were last asked, with the question that
	// is asked of them since: what is neither is settled without them. around is set while something is late or stuck.
	apart  bool
	late   map[uint64]int
	stuck  map[string]*question
	asking sync.WaitGroup
	around atomic.Bool

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
	work, end := context.WithCancel(sp.work)
	err := s.follow(span{sp.intake, work})
	end()
	s.asking.Wait()
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
	s.stuck = map[string]*question{}
	s.last = at
	s.looked, s.bo = time.Now(), backoff{first: 20 * time.Millisecond, most: time.Second}
}

// due is when to look next.
func (s *settler) due(last bool) time.Time {
	rest := lookShare * s.took
	wait := min(rest, lookPause)
	switch {
	case last, !s.troubled.IsZero() && len(s.stuck) == 0:
		wait = markGap
	case s.hurried, s.window.halfFull(): // a look that took long must not hold up the stream for longer
		wait = max(markGap, min(rest, markInterval))
	case wait < markInterval:
		return pause.NextTick(s.looked, markInterval)
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

// confirm repeats until what was published is as durable as is asked for.
func (s *settler) confirm(sp span) error {
	for len(s.unconfirmed) > 0 {
		err := s.confirmed(sp, 2*publishTimeout, s.unconfirmed)
		if err == nil {
			s.unconfirmed = nil
			s.bo.reset()
			return nil
		}
		if err := s.failed(sp, "confirm", err); err != nil {
			return err
		}
	}
	return nil
}

func (s *settler) confirmed(sp span, limit time.Duration, marks []outbox.Mark) error {
	ctx, cancel := context.WithTimeout(sp.work, limit)
	defer cancel()
	return s.sink.Confirm(ctx, s.owner, marks)
}

// question is what one stream is asked beside the loop.
type question struct {
	asked  time.Time
	answer chan error // it has room
}

func (s *settler) ask(sp span, m outbox.Mark) *question {
	q := &question{time.Now(), make(chan error, 1)}
	s.asking.Go(func() { q.answer <- s.confirmed(sp, publishTimeout, []outbox.Mark{m}) })
	return q
}

// confirmApart is confirm where streams live apart. It asks once for all that are not stuck and, when these have not
// all answered, for each of them: who does not answer soon is stuck. trouble is why one is.
//
// Nobody waits for a stream that is stuck. When it answers it is asked again, with the others: the mark moves just
// behind what confirms it.
func (s *settler) confirmApart(sp span) (trouble, err error) {
	var together, rest []outbox.Mark
	for _, m := range s.unconfirmed {
		q := s.stuck[m.Stream]
		if q == nil {
			together = append(together, m)
			continue
		}
		select {
		case err = <-q.answer:
		default:
			rest = append(rest, m)
			continue
		}
		switch {
		case err == nil:
			delete(s.stuck, m.Stream)
			together = append(together, m)
			continue
		case finished(err):
			return nil, err
		case time.Since(q.asked) < askPause:
			q.answer <- err
		default:
			s.stuck[m.Stream] = s.ask(sp, m)
		}
		trouble, rest = err, append(rest, m)
	}
	s.unconfirmed = rest
	if len(together) == 0 {
		return trouble, nil
	}
	if err = s.confirmed(sp, publishTimeout, together); err == nil || finished(err) {
		return trouble, err
	}
	for _, m := range together {
		s.stuck[m.Stream] = s.ask(sp, m)
	}
	soon, cancel := context.WithTimeout(sp.work, askPause)
	defer cancel()
	for _, m := range together {
		q := s.stuck[m.Stream]
		trouble = err
		select {
		case err := <-q.answer:
			switch {
			case err == nil:
				delete(s.stuck, m.Stream)
				continue
			case finished(err):
				return nil, err
			}
			q.answer <- err
		case <-soon.Done():
		}
		s.unconfirmed = append(s.unconfirmed, m)
	}
	return trouble, nil
}

// open reports whether there is something to settle, but for what shares a transaction with what is late: nobody will
// publish that any more.
func (s *settler) open() bool {
	return slices.ContainsFunc(s.pending, func(f *flight) bool {
		return slices.ContainsFunc(f.owed, func(xid uint64) bool { return s.late[xid] == 0 })
	})
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
		if n := len(f.owed); n == 0 || f.owed[n-1] != xid {
			f.owed = append(f.owed, xid)
		}
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
	var trouble, err error
	if s.apart {
		trouble, err = s.confirmApart(sp)
		err = wrap("confirm", err)
	} else {
		err = s.confirm(sp)
	}
	if err != nil {
		return err
	}
	s.beside()
	if err := s.missed(passed); err != nil {
		s.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed).Inc()
		return err
	}
	step, err := s.move(sp.work, passed)
	if err != nil {
		s.drop()
		return s.failed(sp, step, err)
	}
	if trouble != nil {
		return s.trouble(sp, "confirm", trouble)
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
					"the row is swept, perhaps behind later ones of its aggregate",
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
		if slices.ContainsFunc(f.marks, func(m outbox.Mark) bool { return s.stuck[m.Stream] != nil }) {
			for _, xid := range f.owed {
				xids[xid] = true
			}
		}
	}
	return xids
}

// release tells everybody concerned which flights are settled: only from the first one on without a gap. Around what is
// late or stuck others are released. The slot waits all the same, and so does what is behind something of its stream
// that is not settled: its gate remembers that, and so it stays in the window.
func (s *settler) release() {
	var end outbox.LSN
	rows, events, bytes := 0, 0, 0
	var marks []outbox.Mark
	var kept []*flight
	waiting := map[string]bool{}
	around := s.beside()
	for i, f := range s.pending {
		f.owed = slices.DeleteFunc(f.owed, s.mark.Snapshot.Sees)
		settled := !f.late && len(f.owed) == 0
		if !settled && !around {
			kept = s.pending[i:]
			break
		}
		if settled {
			rows, f.published = rows+f.published, 0
		}
		if !settled || slices.ContainsFunc(f.marks, func(m outbox.Mark) bool { return waiting[m.Stream] }) {
			for _, m := range f.marks {
				waiting[m.Stream] = true
			}
			kept = append(kept, f)
			continue
		}
		events, bytes = events+f.events, bytes+f.bytes
		marks = append(marks, f.marks...)
		f.events, f.bytes, f.marks = 0, 0, nil
		if len(kept) == 0 {
			end = max(end, f.end)
		} else if last := kept[len(kept)-1]; last.spent() {
			last.end = max(last.end, f.end)
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

// beside reports whether something is late or stuck, and notes it for others.
func (s *settler) beside() bool {
	around := len(s.late)+len(s.stuck) > 0
	s.around.Store(around)
	return around
}

// failed is trouble, and waits a little.
func (s *settler) failed(sp span, step string, err error) error {
	err = s.trouble(sp, step, err)
	if err == nil {
		s.bo.wait(sp.intake)
	}
	return err
}

// trouble notes that a step has failed. An error says that it is not to be repeated.
func (s *settler) trouble(sp span, step string, err error) error {
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
