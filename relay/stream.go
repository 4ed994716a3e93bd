package relay

import (
	"context"
	"errors"
	"posthaste/internal/poison"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/outbox"
)

const (
	// publishTimeout bounds one attempt to publish a batch, or one other call of the sink.
	publishTimeout = 5 * time.Second
	// gulpRows and gulpBytes bound what the publisher takes at once.
	gulpRows  = 2000
	gulpBytes = 4 << 20
	// goodStream is how long a stream must have run for the next hand-over to come without delay.
	goodStream = 10 * time.Second
)

// stream is one run of the slot reader: reader -> publisher -> settler, each a goroutine.
type stream struct {
	l      *leadership
	gates  *gates
	window *window

	chunks  chan outbox.Chunk
	flights chan *flight

	// handover is H: for commits at or below it the table is asked which rows still exist. Streams met later have
	// an H of their own. Written before the publisher starts, and by the publisher.
	handover    outbox.LSN
	handoverOf  map[string]outbox.LSN
	maxHandover outbox.LSN
	lanes       map[string]*lane // publisher only
	refused     poison.Refusals
	// running is set when H is known and the stream is being read.
	running atomic.Bool
	since   time.Time // of running; written before it
	// passed is the position up to which the publisher is done with everything.
	passed atomic.Uint64
	// sinkFailing is set while a publish is being repeated: the stream then stands still for a known reason.
	sinkFailing atomic.Bool

	// unanswered is how many audits in a row the table did not answer. Monitor only.
	unanswered int

	mu sync.Mutex
	// seqs are the rows that the publisher has taken and the settler has not finished, for the audit.
	seqs map[int64]struct{}

	fail context.CancelCauseFunc // ends the intake with a cause
}

// lane is the stream lane of one stream, and how far it is settled.
type lane struct {
	pub     outbox.LanePublisher
	settled atomic.Int64 // batch number, written by the settler
	told    int64        // batch number, publisher only
}

// span is the two contexts of an orderly stop: while intake lasts, new work is taken; while work lasts, what was taken is
// finished. Work never ends before intake has, and neither ends without a cause.
type span struct{ intake, work context.Context }

// flight is what was published and waits to be settled.
type flight struct {
	items  []outbox.Settlement
	marks  []outbox.Mark
	end    outbox.LSN // every transaction ending at or below it is complete with this flight
	events int        // in the window
	bytes  int
	seqs   []int64
}

var errSourceEnded = errors.New("the source ended")

// stream streams until something ends it, then settles what was published, as far as that is possible.
func (l *leadership) stream(ctx context.Context) (transition, error) {
	began := time.Now()
	s := &stream{
		l: l, gates: l.gates, window: l.window, chunks: make(chan outbox.Chunk, 4), flights: make(chan *flight, 4096),
		handoverOf: map[string]outbox.LSN{}, lanes: map[string]*lane{}, seqs: map[int64]struct{}{},
	}
	l.gates.fresh = s.meet
	err := s.run(ctx)
	l.gates.fresh = nil
	l.health.clear(conditionSettle)
	l.health.clear(conditionPark)
	l.health.clear(conditionAudit)
	if n, b := l.window.held(); n > 0 {
		l.window.release(n, b) // what was not settled is in doubt now, and nobody waits for it
	}
	if time.Since(began) < goodStream {
		l.failures++
	} else {
		l.failures = 0
	}
	l.reason = slotReason(err)
	if fenced := (*outbox.FencedError)(nil); errors.As(err, &fenced) {
		l.fence = fenced.Epoch
	}
	switch {
	case errors.Is(err, errToggled):
		l.reason, l.failures = outbox.ReasonToggle, 0
		return onOver, nil
	case errors.Is(err, outbox.ErrSuperseded):
		return onLost, err
	case ctx.Err() != nil:
		return onOver, nil // run knows better
	}
	l.log.Warn("the stream ended; sweeping", "reason", l.reason, "err", err)
	var se *outbox.SlotError
	if errors.As(err, &se) {
		l.unusable(ctx, err)
	}
	return onOver, nil
}

// run returns the cause of the stream's end.
func (s *stream) run(ctx context.Context) error {
	intake, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	s.fail = fail
	work, stopWork := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stopWork(nil)
	sp := span{intake, work}
	source, stopSource := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSource()
	s.l.keeper.onExhausted(func() {
		fail(&outbox.SlotError{Reason: outbox.ReasonBudget, Err: errors.New("the WAL budget is exhausted")})
	})
	defer s.l.keeper.onExhausted(nil)

	var reading, working sync.WaitGroup
	reading.Go(func() {
		defer close(s.chunks)
		err := s.l.o.Source.Run(source, s.started, s.chunks)
		if err == nil {
			err = errSourceEnded
		}
		fail(err)
	})
	working.Go(func() {
		defer close(s.flights)
		if err := s.publishLoop(sp); err != nil {
			fail(err)
		}
	})
	working.Go(func() {
		if err := s.settleLoop(sp); err != nil {
			fail(err)
			stopWork(err) // without settling there is no use in publishing on
		}
	})
	working.Go(func() { s.monitor(intake) })

	<-intake.Done()
	cause := context.Cause(intake)
	if s.hopeless(cause) {
		stopWork(cause)
	} else {
		// The rest of the timeout is for what follows: confirming, standing down, closing.
		deadline := time.AfterFunc(max(s.l.o.DrainTimeout-2*time.Second, s.l.o.DrainTimeout/2), func() { stopWork(errors.New("drain timeout")) })
		defer deadline.Stop()
	}
	working.Wait()
	stopSource()         // only now, so that the last settled position is confirmed
	for range s.chunks { //nolint:revive // let the reader finish its hand-over
	}
	reading.Wait()
	return cause
}

// hopeless reports whether nothing of ours can be published or settled any more.
func (s *stream) hopeless(cause error) bool {
	var fenced *outbox.FencedError
	return errors.Is(cause, errLockLost) || errors.Is(cause, outbox.ErrSuperseded) || errors.Is(cause, outbox.ErrGap) || errors.As(cause, &fenced)
}

// started runs when nobody else can move the slot any more: one more pass, then H.
func (s *stream) started(ctx context.Context) error {
	l := s.l
	st, err := l.o.Slots.Status(ctx)
	if err != nil {
		return err
	}
	if st.Confirmed > l.noted {
		if err := l.keeper.moved(ctx); err != nil {
			return err
		}
		return &outbox.SlotError{Reason: outbox.ReasonSlotActive, Err: errors.New("somebody else moved the slot during the hand-over"), Mend: "it starts over by itself"}
	}
	if err := l.during(ctx, func(ctx context.Context) error { return l.o.Sweeper.Drain(ctx, l.scope(l.gates)) }); err != nil {
		return err
	}
	if s.handover, err = l.o.Store.InsertLSN(ctx); err != nil {
		return err
	}
	s.maxHandover = s.handover
	l.handover = s.handover
	if l.failures == 0 {
		s.wellAgain() // else it has to run for a while first, so that readiness does not flicker
	}
	if err := l.record(ctx, outbox.ModeCDC); err != nil {
		return err
	}
	s.since = time.Now()
	s.running.Store(true)
	return nil
}

// wellAgain forgets why the slot was not streamed before.
func (s *stream) wellAgain() {
	s.l.degraded = ""
	s.l.health.clear("slot")
}

// meet gives a stream that the adoption did not know its own H: a zombie may have published to it in between.
func (s *stream) meet(ctx context.Context, stream string) error {
	if s.handover == 0 {
		return nil // still sweeping: H comes later and covers it
	}
	lsn, err := s.l.o.Store.InsertLSN(ctx)
	if err != nil {
		return err
	}
	s.handoverOf[stream] = lsn
	s.maxHandover = max(s.maxHandover, lsn)
	return nil
}

// publishLoop takes what the reader delivers until the intake ends.
func (s *stream) publishLoop(sp span) error {
	forgotten := outbox.LSN(0)
	flush := time.NewTicker(time.Second)
	defer flush.Stop()
	for {
		var rows []*outbox.Row
		var position outbox.LSN
		select {
		case <-sp.intake.Done():
			return nil
		case <-flush.C:
			s.tellSettled(sp.work)
			continue
		case c, ok := <-s.chunks:
			if !ok {
				return nil
			}
			rows, position = s.gulp(c)
		}
		if err := s.processAll(sp, rows); err != nil {
			return err
		}
		if position != 0 {
			s.passed.Store(uint64(position))
		}
		if passed := outbox.LSN(s.passed.Load()); passed >= s.maxHandover && forgotten < s.maxHandover {
			if s.forgetDoubt(sp.work) {
				forgotten = s.maxHandover
			}
		}
	}
}

// gulp merges the chunks that are waiting, up to the gulp's bounds.
func (s *stream) gulp(c outbox.Chunk) (rows []*outbox.Row, position outbox.LSN) {
	bytes := 0
	for {
		for i := range c.Rows {
			rows = append(rows, &c.Rows[i])
		}
		bytes += c.Bytes
		position = max(position, c.Position)
		if len(rows) >= gulpRows || bytes >= gulpBytes {
			return rows, position
		}
		select {
		case next, ok := <-s.chunks:
			if !ok {
				return rows, position
			}
			c = next
		default:
			return rows, position
		}
	}
}

// forgetDoubt empties the doubt sets: whatever was in doubt was committed below H, and H is passed.
func (s *stream) forgetDoubt(ctx context.Context) bool {
	for _, name := range s.gates.streams() {
		actx, cancel := context.WithTimeout(ctx, publishTimeout)
		err := s.l.o.Sink.ForgetDoubt(actx, s.gates.owner, name)
		cancel()
		if err != nil {
			return false
		}
	}
	return true
}

// processAll publishes a gulp in pieces that fit half the window, so that one piece is settled while the next is published.
func (s *stream) processAll(sp span, rows []*outbox.Row) error {
	maxRows, maxBytes := max(s.window.maxEvents/2, 1), max(s.window.maxBytes/2, 1)
	for len(rows) > 0 {
		n, bytes := 0, 0
		for n < len(rows) && n < maxRows && (n == 0 || bytes+rows[n].Size() <= maxBytes) {
			bytes += rows[n].Size()
			n++
		}
		if err := s.process(sp, rows[:n]); err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// process publishes one piece and hands it to the settler.
func (s *stream) process(sp span, rows []*outbox.Row) error {
	f := &flight{}
	events := rows[:0:0]
	for _, r := range rows {
		f.end = max(f.end, r.End)
		if r.Marker() {
			continue
		}
		events = append(events, r)
		f.bytes += r.Size()
		f.seqs = append(f.seqs, r.Seq)
	}
	f.events = len(events)
	if len(events) > 0 {
		if err := s.window.acquire(sp.intake, f.events, f.bytes); err != nil {
			return context.Cause(sp.intake)
		}
		s.taken(f.seqs)
		owed, err := s.owed(sp.intake, events)
		if err != nil {
			return err
		}
		if err := s.publish(sp, owed, f); err != nil {
			return err
		}
	}
	if f.end == 0 && f.events == 0 {
		return nil
	}
	select {
	case s.flights <- f:
		return nil
	case <-sp.work.Done():
		return context.Cause(sp.work)
	}
}

func (s *stream) taken(seqs []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range seqs {
		s.seqs[n] = struct{}{}
	}
}

func (s *stream) finished(seqs []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range seqs {
		delete(s.seqs, n)
	}
}

// owed drops the rows that were settled before the stream began. Rows committed above H need no question.
func (s *stream) owed(ctx context.Context, rows []*outbox.Row) ([]*outbox.Row, error) {
	var ask []*outbox.Row
	for _, r := range rows {
		name := outbox.StreamName(s.l.o.Prefix, r.AggregateType)
		if err := s.ensure(ctx, name); err != nil {
			return nil, err
		}
		if r.Commit <= max(s.handover, s.handoverOf[name]) {
			ask = append(ask, r)
		}
	}
	if len(ask) == 0 {
		return rows, nil
	}
	gone, err := s.gone(ctx, ask)
	if err != nil || len(gone) == 0 {
		return rows, err
	}
	owed := rows[:0:0]
	for _, r := range rows {
		if !gone[r] {
			owed = append(owed, r)
		}
	}
	return owed, nil
}

// ensure makes a stream ready, repeating what fails for the moment.
func (s *stream) ensure(ctx context.Context, name string) error {
	bo := backoff{first: 50 * time.Millisecond, most: 2 * time.Second}
	for {
		actx, cancel := context.WithTimeout(ctx, publishTimeout)
		err := s.gates.ensure(actx, name)
		cancel()
		if err == nil {
			return nil
		}
		if finished(err) {
			s.l.publishOutcome(err)
			return err
		}
		s.l.publishOutcome(err)
		s.sinkFailing.Store(true)
		bo.wait(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// finished reports whether err ends the lane it came from.
func finished(err error) bool {
	var fenced *outbox.FencedError
	var foreign *outbox.ForeignError
	return errors.Is(err, outbox.ErrGap) || errors.As(err, &fenced) || errors.As(err, &foreign)
}

// gone returns which of rows exist no more. "Not there" means nothing until the row's transaction is visible, so it
// waits for that, which also keeps the order.
func (s *stream) gone(ctx context.Context, rows []*outbox.Row) (map[*outbox.Row]bool, error) {
	gone := map[*outbox.Row]bool{}
	bo := backoff{first: 5 * time.Millisecond, most: 100 * time.Millisecond}
	for len(rows) > 0 {
		found, err := s.l.o.Store.Lookup(ctx, rows)
		if err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			bo.wait(ctx)
			continue
		}
		hidden := rows[:0:0]
		for i, r := range rows {
			switch {
			case found.Rows[i]:
			case found.Snapshot.Visible(r.XID):
				gone[r] = true
			default:
				hidden = append(hidden, r)
			}
		}
		if rows = hidden; len(rows) > 0 {
			bo.wait(ctx)
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	return gone, nil
}
