package relay

import (
	"context"
	"time"

	"posthaste/outbox"
)

// settleRows bounds one settling statement.
const settleRows = 2000

// settler confirms what was published, deletes its rows, and tells everybody concerned. One goroutine owns it.
type settler struct {
	*reporter
	store  outbox.Store
	sink   outbox.Sink
	source outbox.Source
	owner  outbox.Owner
	window *window
	taken  *taken
	lanes  *lanes

	flights <-chan *flight
}

// run settles what was published, behind the publisher, until there is no more. While the intake lasts it repeats
// what fails; afterwards the first failure ends it, because what is not settled becomes doubt.
func (s *settler) run(sp span, fail func(error)) error {
	for f := range s.flights {
		f = s.collect(f)
		if err := s.settle(sp, f); err != nil {
			fail(err)             // first: only that ends the publisher, whose end the next line waits for
			for range s.flights { //nolint:revive // let the publisher come to its end
			}
			return err
		}
	}
	return nil
}

// collect merges the flights that are waiting into one.
func (s *settler) collect(f *flight) *flight {
	for len(f.items) < settleRows {
		select {
		case next, ok := <-s.flights:
			if !ok {
				return f
			}
			f.items = append(f.items, next.items...)
			f.marks = append(f.marks, next.marks...)
			f.seqs = append(f.seqs, next.seqs...)
			f.end = max(f.end, next.end)
			f.events += next.events
			f.bytes += next.bytes
		default:
			return f
		}
	}
	return f
}

func (s *settler) settle(sp span, f *flight) error {
	began := time.Now()
	retry := func(step string, call func(ctx context.Context) error) error {
		bo := backoff{first: 20 * time.Millisecond, most: time.Second}
		for {
			actx, cancel := context.WithTimeout(sp.work, 2*publishTimeout)
			err := call(actx)
			cancel()
			if err == nil {
				return nil
			}
			if finished(err) || sp.intake.Err() != nil || sp.work.Err() != nil {
				return wrap(step, err)
			}
			s.log.Debug("settling is repeated", "step", step, "err", err)
			if time.Since(began) > patience && s.health.fail(conditionSettle, step+": "+err.Error()) {
				s.log.Warn("published events cannot be settled; retrying", "step", step, "err", err)
			}
			bo.wait(sp.intake)
		}
	}
	marks := lastMarks(f.marks)
	if len(marks) > 0 {
		err := retry("confirm", func(ctx context.Context) error { return s.sink.Confirm(ctx, s.owner, marks) })
		if err != nil {
			return err
		}
	}
	if len(f.items) > 0 {
		if err := s.remove(sp.work, retry, f.items); err != nil {
			return err
		}
	}
	s.done(f, marks)
	return nil
}

// remove deletes the rows. Rows that are not found are asked for again until their transaction is visible, then looked
// for in every part once, and then let go: they were settled before.
func (s *settler) remove(work context.Context, retry func(string, func(context.Context) error) error,
	items []outbox.Settlement,
) error {
	bo := backoff{first: 5 * time.Millisecond, most: 200 * time.Millisecond}
	total := len(items)
	for {
		var found outbox.Found
		err := retry("settle", func(ctx context.Context) (err error) {
			found, err = s.store.Settle(ctx, items)
			return err
		})
		if err != nil {
			return err
		}
		hidden := false
		rest := items[:0:0]
		for i, it := range items {
			if !found.Rows[i] {
				rest = append(rest, it)
				hidden = hidden || !found.Snapshot.Visible(it.XID)
			}
		}
		if items = rest; len(items) == 0 {
			break
		}
		if !hidden {
			err := retry("delete anywhere", func(ctx context.Context) (err error) {
				found, err = s.store.DeleteAnywhere(ctx, items)
				return err
			})
			if err != nil {
				return err
			}
			missing := 0
			for _, ok := range found.Rows {
				if !ok {
					missing++
				}
			}
			s.metrics.missing.Add(float64(missing))
			total -= missing
			break
		}
		bo.wait(work)
		if work.Err() != nil {
			return context.Cause(work)
		}
	}
	s.settled(total)
	return nil
}

// done reports a settled flight to everybody concerned.
func (s *settler) done(f *flight, marks []outbox.Mark) {
	s.lanes.settled(marks)
	if s.health.clear(conditionSettle) {
		s.log.Info("settling again")
	}
	s.taken.remove(f.seqs)
	if f.end != 0 {
		s.source.Settled(f.end)
	}
	if f.events > 0 {
		s.window.release(f.events, f.bytes)
	}
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
