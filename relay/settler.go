package relay

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/relay/stream"
)

const (
	// markInterval is how often the mark is moved, markGap the least time between two scans.
	markInterval = time.Second
	markGap      = 50 * time.Millisecond
	// scanShare is how many times longer than scanning the settler does something else, for scanPause at most.
	scanShare = 10
	scanPause = 5 * time.Second
	// probeWait is how long the settler waits for the streams that it asks one by one, probesAtOnce how many of them it
	// asks at a time: each uses a connection, and publishing needs some.
	probeWait    = time.Second
	probesAtOnce = 32
)

// settler confirms what the workers have published, moves the mark over it, and reports that to the slot, the gates and
// the window. One goroutine owns it.
//
// A mark moves on evidence: it comes to see a transaction when each of its rows, as a scan of the table finds them, was
// published and confirmed, or parked. A row that a scan finds and that the stream has passed without delivering it was
// missed.
type settler struct {
	*reporter
	store   Marks
	sink    stream.Publisher
	source  outbox.Source
	gates   *gates
	window  *window
	router  *router
	tracker *tracker
	// begun is closed when the tracker knows the mark, ended when nothing more will be published.
	begun, ended chan struct{}

	// least is the transaction id that the next mark has to reach: the attempt before, whose outcome is unknown, did.
	least  uint64
	marker outbox.Marker // nil: none is open
	last   outbox.Pass   // of the last scan, whichever marker's
	// suspects are the rows that a scan of this marker found and the stream had not delivered. It must have done so at
	// their End.
	suspects outbox.Look
	// advanced is when the last advance started, took the duration of its scan.
	advanced time.Time
	took     time.Duration
	// hurried is set when the router needs room in the window.
	hurried bool
	// troubled is since when settling fails; zero if it does not.
	troubled time.Time
	// flushed is when the workers were last asked to report to their gates.
	flushed time.Time

	// beside are the goroutines of calls that settling does not depend on.
	beside     sync.WaitGroup
	forgetting atomic.Bool
	forgotten  atomic.Uint64 // H up to which doubt is forgotten

	// stuck are the streams that could not be confirmed, with the last error. Each has a goroutine that repeats that,
	// and settling continues without them.
	mu    sync.Mutex
	stuck map[string]error
	// probes bounds how many of them ask at a time.
	probes chan struct{}
}

// begin sets what is settled when the stream begins, and H as its end. It is called once, before the first portion.
func (s *settler) begin(at outbox.Pass) {
	s.tracker.begin(at)
	s.least, s.last = at.Snapshot.Max(), at
	close(s.begun)
}

// run settles what is published until there is no more. While the intake lasts it repeats what fails; afterwards the
// first failure ends it, because what is not settled becomes doubt.
func (s *settler) run(sp span) error {
	work, end := context.WithCancel(sp.work)
	defer s.drop()
	defer s.beside.Wait()
	defer end()
	sp.work = work
	select {
	case <-s.begun:
	case <-s.ended:
		return nil // it never began
	}
	s.advanced, s.flushed = time.Now(), time.Now()
	ended := s.ended
	for ended != nil || s.tracker.open() {
		wait := time.Until(s.due(ended == nil))
		if wait <= 0 {
			if err := s.advance(sp); err != nil {
				return err
			}
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-ended:
			ended = nil
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

// due is when to scan next.
func (s *settler) due(last bool) time.Time {
	rest := scanShare * s.took
	wait := min(rest, scanPause)
	switch {
	case last:
		wait = markGap
	case s.marker == nil && !s.troubled.IsZero():
		wait = max(markGap, min(time.Since(s.troubled), markInterval))
	case s.hurried, s.window.halfFull(): // a scan that took long must not hold up the stream for longer
		wait = max(markGap, min(rest, markInterval))
	case wait < markInterval:
		return pause.NextTick(s.advanced, markInterval)
	}
	return s.advanced.Add(wait)
}

// advance confirms what is published, scans, and moves the mark to what is published of what the scan sees. It confirms
// just before: what Redis loses between the two is lost, and what it lost before is published again.
func (s *settler) advance(sp span) error {
	s.hurried, s.advanced = false, time.Now()
	if time.Since(s.flushed) >= markInterval {
		s.flushed = time.Now()
		s.router.flush()
		s.forgetDoubt(sp.work)
	}
	passed := s.tracker.position() // before the scan, which finds what was committed since
	if err := s.confirm(sp); err != nil {
		return fmt.Errorf("confirm: %w", err)
	}
	if err := s.missed(passed); err != nil {
		s.metrics.auditFailures.WithLabelValues(outbox.ReasonMissed).Inc()
		return err
	}
	step, err := s.move(sp.work, passed)
	s.release()
	if err != nil {
		s.drop()
		return s.trouble(sp, step, err)
	}
	if err := s.unconfirmable(); err != nil {
		return s.trouble(sp, "confirm", err)
	}
	s.troubled = time.Time{}
	if s.health.clear(conditionSettle) {
		s.log.Info("settling again")
	}
	return nil
}

// confirm confirms what is published, in one call for all streams. If that fails, each stream is asked alone, and those
// that do not answer soon are stuck.
func (s *settler) confirm(sp span) error {
	for range 2 {
		marks := s.tracker.unconfirmed(s.gates.streamLane(), s.isStuck)
		var err error
		if len(marks) > 0 {
			err = s.confirmed(sp.work, marks)
		}
		if err == nil {
			s.tracker.confirm(marks)
			return nil
		}
		if finished(err) || sp.work.Err() != nil || sp.intake.Err() != nil {
			return err
		}
		s.probe(sp, marks, err)
	}
	return nil
}

func (s *settler) confirmed(ctx context.Context, marks []outbox.Mark) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return s.sink.Confirm(ctx, s.gates.owner, marks)
}

// probe asks each stream alone until it can be confirmed, and waits a little for all of them.
func (s *settler) probe(sp span, marks []outbox.Mark, err error) {
	var answers sync.WaitGroup
	for _, m := range marks {
		s.mu.Lock()
		s.stuck[m.Stream] = err
		s.mu.Unlock()
		answers.Add(1)
		answered := sync.OnceFunc(answers.Done)
		s.beside.Go(func() {
			defer answered()
			bo := pause.Backoff{First: probeWait, Most: probeWait}
			for {
				s.probes <- struct{}{}
				err := s.confirmed(sp.work, []outbox.Mark{m})
				<-s.probes
				if err == nil || finished(err) || sp.work.Err() != nil {
					s.mu.Lock()
					delete(s.stuck, m.Stream) // the call for all streams finds the same
					s.mu.Unlock()
					return
				}
				s.mu.Lock()
				s.stuck[m.Stream] = err
				s.mu.Unlock()
				answered()
				bo.Wait(sp.work)
			}
		})
	}
	all := make(chan struct{})
	s.beside.Go(func() { answers.Wait(); close(all) })
	soon := time.NewTimer(probeWait)
	defer soon.Stop()
	select {
	case <-all:
	case <-soon.C:
	case <-sp.work.Done():
	}
}

func (s *settler) isStuck(stream string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stuck[stream] != nil
}

// unconfirmable returns the error of the first stream that is stuck, by name.
func (s *settler) unconfirmable() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.stuck) == 0 {
		return nil
	}
	return s.stuck[slices.Min(slices.Collect(maps.Keys(s.stuck)))]
}

// missed reports a row that the stream has passed without delivering it.
func (s *settler) missed(passed outbox.LSN) error {
	if passed < s.suspects.End {
		return nil
	}
	suspects := s.suspects
	s.suspects = outbox.Look{}
	xid := s.tracker.missing(suspects.Owed)
	if xid == 0 {
		return nil
	}
	return &outbox.SlotError{
		Reason: outbox.ReasonMissed,
		Err:    fmt.Errorf("the stream passed %s without delivering a row of transaction %d", suspects.End, xid),
		Remedy: "check that the publication has the outbox table and that no other program moves the slot; " +
			"the row is polled, perhaps behind later ones of its aggregate",
	}
}

// move scans once, and moves the mark if there is something to settle. An error comes with the step that failed.
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
	// Rows that the stream is far from are not listed.
	below := uint64(math.MaxInt64)
	if passed < s.last.End {
		below = max(s.tracker.highest+1, s.least)
	}
	var look outbox.Look
	began := time.Now()
	err = call("look", func(ctx context.Context) (err error) {
		look, err = s.marker.Look(ctx, s.tracker.mark, below)
		return err
	})
	if s.took = time.Since(began); err != nil {
		return step, err
	}
	s.last = look.Pass
	to, news, undone := s.tracker.reach(look, below, s.least)
	s.took = time.Since(began)
	if len(s.suspects.Owed) == 0 {
		s.suspects = outbox.Look{Pass: look.Pass, Owed: undone}
	}
	if !news {
		return "", nil
	}
	s.least = max(s.least, to.Snapshot.Max())
	err = call("move", func(ctx context.Context) error {
		return s.marker.Move(ctx, s.gates.owner, to, s.tracker.entries)
	})
	if err != nil {
		return step, err
	}
	s.tracker.moved(to)
	return "", nil
}

// release reports what has become settled.
func (s *settler) release() {
	r := s.tracker.release()
	s.router.settledTo(r.numbers)
	if r.rows > 0 {
		s.settled(r.rows)
		s.window.settled(r.rows)
	}
	if r.end != 0 {
		s.source.Settled(r.end)
	}
	if r.events > 0 {
		s.window.release(r.events, r.bytes)
	}
}

// forgetDoubt empties the doubt sets when everything that was in doubt is published.
func (s *settler) forgetDoubt(ctx context.Context) {
	streams, handover, done := s.router.doubtful()
	if !done || s.forgotten.Load() >= uint64(handover) || !s.forgetting.CompareAndSwap(false, true) {
		return
	}
	s.beside.Go(func() {
		defer s.forgetting.Store(false)
		var failed error
		for _, stream := range streams {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			if err := s.gates.sink.ForgetDoubt(actx, s.gates.owner, stream); err != nil {
				failed = err
			}
			cancel()
		}
		if failed == nil {
			s.forgotten.Store(uint64(handover))
		}
	})
}

// trouble notes that a step has failed. An error says that it is not to be repeated.
func (s *settler) trouble(sp span, step string, err error) error {
	if finished(err) || superseded(err) || sp.intake.Err() != nil || sp.work.Err() != nil {
		return fmt.Errorf("%s: %w", step, err)
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

// drop closes the marker. Its scan results are not valid in another session.
func (s *settler) drop() {
	if s.marker != nil {
		s.marker.Close()
	}
	s.marker, s.suspects = nil, outbox.Look{}
	// The next scan may be much later, so how far the stream is from its rows is unknown.
	s.last.End = math.MaxUint64
}
