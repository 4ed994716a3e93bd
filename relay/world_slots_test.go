package relay

import (
	"context"
	"errors"
	"time"

	"posthaste/outbox"
)

// memSlots is an instance's Slots.
type memSlots struct{ i *instance }

var _ outbox.Slots = memSlots{}

func (s memSlots) pg() *postgres { return s.i.w.pg }

func (s memSlots) Status(ctx context.Context) (outbox.SlotStatus, error) {
	return call(ctx, s.i, "Slots.Status", func() (outbox.SlotStatus, error) {
		pg := s.pg()
		if pg.slot == nil {
			return outbox.SlotStatus{MaxKeepBytes: -1}, nil
		}
		return outbox.SlotStatus{
			Exists: true, Active: pg.slot.active != nil, Lost: pg.slot.lost, Confirmed: pg.slot.confirmed,
			Restart:       pg.slot.restart,
			RetainedBytes: int64(pg.wal - pg.slot.restart), ConfirmedLagBytes: int64(pg.wal - pg.slot.confirmed),
			MaxKeepBytes: -1,
		}, nil
	})
}

func (s memSlots) Ensure(ctx context.Context, making func(ctx context.Context) error) (bool, error) {
	made, err := call(ctx, s.i, "Slots.Ensure", func() (bool, error) {
		pg := s.pg()
		if pg.unpublished || pg.slot != nil && pg.slot.lost {
			s.i.w.dropSlot() // one that is whole again says nothing about what was written before
			pg.unpublished = false
		}
		return pg.slot != nil, nil
	})
	if made || err != nil {
		return false, err
	}
	if making != nil {
		if err := making(ctx); err != nil {
			return false, err
		}
	}
	for range 30 { // a slot waits for every open transaction, and not forever
		var open bool
		s.i.w.do(func() {
			for _, tx := range s.pg().running {
				open = open || tx.commit == 0
			}
		})
		if !open {
			return s.create(ctx)
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-s.i.dead:
			return false, errDead
		case <-time.After(100 * time.Millisecond):
		}
	}
	return false, slotTrouble(outbox.ReasonTransactionHeld)
}

func (s memSlots) create(ctx context.Context) (bool, error) {
	return call(ctx, s.i, "Slots.Create", func() (bool, error) {
		pg := s.pg()
		if pg.slot != nil {
			return false, nil
		}
		pg.slot = &slot{w: s.i.w, confirmed: pg.wal, restart: pg.wal}
		pg.passed("made")
		s.i.w.grow(20)
		return true, nil
	})
}

func (s memSlots) Advance(ctx context.Context, target outbox.LSN) error {
	return command(ctx, s.i, "Slots.Advance", func() error {
		pg := s.pg()
		switch {
		case pg.slot == nil:
			return slotTrouble(outbox.ReasonSlotMissing)
		case pg.slot.active != nil:
			return slotTrouble(outbox.ReasonSlotActive)
		case pg.slot.lost:
			return slotTrouble(outbox.ReasonSlotLost)
		}
		pg.slot.confirmed = max(pg.slot.confirmed, min(target, pg.wal))
		pg.slot.follow()
		pg.passed("moved")
		return nil
	})
}

func (s memSlots) Nudge(ctx context.Context) error {
	return command(ctx, s.i, "Slots.Nudge", func() error {
		if s.pg().slot != nil {
			s.pg().slot.follow()
		}
		return nil
	})
}

func (s memSlots) Drop(ctx context.Context) error {
	return command(ctx, s.i, "Slots.Drop", func() error {
		s.i.w.dropSlot()
		return nil
	})
}

func (s memSlots) Evict(ctx context.Context) error {
	return command(ctx, s.i, "Slots.Evict", func() error {
		if sl := s.pg().slot; sl != nil && sl.active != nil {
			sl.active.end()
		}
		return nil
	})
}

// slotTrouble is what the server says of a slot that cannot be used.
func slotTrouble(reason string) error {
	return &outbox.SlotError{Reason: reason, Err: errors.New("the server says so")}
}

// memSource is an instance's Source.
type memSource struct{ i *instance }

var _ outbox.Source = memSource{}

const (
	// chunkRows is small, so that transactions are cut.
	chunkRows = 3
	// statusEvery is the interval at which the settled position is reported to the server.
	statusEvery = 100 * time.Millisecond
)

func (s memSource) Settled(end outbox.LSN) {
	s.i.w.do(func() {
		s.i.w.pg.behind("the source is told", s.i.settled, end)
		s.i.settled = max(s.i.settled, end)
	})
}

func (s memSource) Run(ctx context.Context, started func(ctx context.Context) error, out chan<- outbox.Chunk) error {
	w := s.i.w
	ws, err := s.open(ctx)
	if err != nil {
		return err
	}
	r := &reading{walsender: ws, i: s.i}
	w.do(func() {
		r.publication = w.pg.publication
		s.i.settled = 0
		r.at = ws.slot.confirmed
		r.reached, r.offered = r.at, r.at
	})
	err = r.started(ctx, started)
	if err == nil {
		w.do(func() {
			if ws.slot.active == ws {
				w.pg.streamed()
			}
		})
		err = r.run(ctx, out)
	}
	_ = r.status(context.WithoutCancel(ctx))
	s.i.awake()
	w.do(func() {
		if !s.i.isDead() {
			ws.end()
		}
	})
	return err
}

// open starts replication. A reply that is lost leaves a walsender that the server misses its client of only later.
func (s memSource) open(ctx context.Context) (*walsender, error) {
	w := s.i.w
	var ghost *walsender
	ws, err := call(ctx, s.i, "Source.Start", func() (*walsender, error) {
		sl := w.pg.slot
		switch {
		case sl == nil:
			return nil, slotTrouble(outbox.ReasonSlotMissing)
		case sl.active != nil:
			return nil, slotTrouble(outbox.ReasonSlotActive)
		case sl.lost:
			return nil, slotTrouble(outbox.ReasonSlotLost)
		}
		if w.pg.leader != nil && w.pg.leader.i == s.i {
			s.i.reads(w.pg.state.Owner)
		}
		sl.active = &walsender{of: s.i, slot: sl, gone: make(chan struct{})}
		ghost = sl.active
		return sl.active, nil
	})
	if err != nil {
		w.do(func() {
			if ghost != nil {
				ghost.ghost = true
				w.after(lease, ghost.end)
			}
		})
	}
	return ws, err
}

// reading is one stream.
type reading struct {
	*walsender
	i *instance
	// at is where the slot stood, next the place in the log of the transaction that comes next, and row of its next
	// row.
	at        outbox.LSN
	next, row int
	// publication is what it was in the beginning: no row is handed out behind a change.
	publication int
	// reached: everything committed below it was handed out. offered was said to be; handed is the last end of it.
	reached, offered, handed outbox.LSN
}

// started calls back, for as long as the connection lasts.
func (r *reading) started(ctx context.Context, started func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := background(func() error { return started(ctx) })
	select {
	case err := <-done:
		return err
	case <-r.gone:
	case <-r.i.dead:
	}
	cancel()
	_ = <-done // it follows from the cancellation
	return slotTrouble(outbox.ReasonConnection)
}

func (r *reading) run(ctx context.Context, out chan<- outbox.Chunk) error {
	tick := time.NewTicker(statusEvery)
	defer tick.Stop()
	var c outbox.Chunk
	offer := true // a position without rows
	for {
		r.i.awake()
		var grown <-chan struct{}
		if len(c.Rows) == 0 {
			changed := false
			r.i.w.do(func() {
				c = r.read()
				changed = len(c.Rows) > 0 && r.publication != r.i.w.pg.publication
				grown = r.i.w.grown
			})
			if changed {
				return slotTrouble(outbox.ReasonPublication)
			}
		}
		to := out
		if len(c.Rows) == 0 && (c.Position <= r.offered || !offer) {
			to = nil
		}
		select {
		case to <- c:
			r.sent(&c)
			offer = false
		case <-grown:
		case <-tick.C:
			offer = true
			if err := r.status(ctx); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-r.gone:
			return slotTrouble(outbox.ReasonConnection)
		case <-r.i.dead:
			return errDead
		}
	}
}

// read decodes the next rows. The caller holds mu.
func (r *reading) read() (c outbox.Chunk) {
	log := r.i.w.pg.log
	for ; r.next < len(log) && len(c.Rows) < chunkRows; r.next++ {
		tx := log[r.next]
		if tx.end <= r.at || tx.streamedRows() == 0 {
			continue
		}
		for ; r.row < len(tx.rows) && len(c.Rows) < chunkRows; r.row++ {
			if !tx.rows[r.row].unstreamed {
				row := outbox.Row{Record: tx.rows[r.row].Record, Commit: tx.commit, XID: uint32(tx.xid)}
				c.Rows = append(c.Rows, row)
				c.Bytes += row.Size()
			}
		}
		if r.row < len(tx.rows) {
			c.Position = r.reached
			return c
		}
		r.row = 0
		c.Rows[len(c.Rows)-1].End = tx.end
		r.reached = tx.end
	}
	if r.next == len(log) {
		r.reached = r.i.w.pg.wal
	}
	c.Position = r.reached
	return c
}

func (tx *transaction) streamedRows() (n int) {
	for _, r := range tx.rows {
		if !r.unstreamed {
			n++
		}
	}
	return n
}

func (r *reading) sent(c *outbox.Chunk) {
	r.offered = c.Position
	for _, row := range c.Rows {
		r.handed = max(r.handed, row.End)
	}
	*c = outbox.Chunk{}
}

// status tells the server what is settled: up to what was offered if nothing is under way.
func (r *reading) status(ctx context.Context) error {
	var to outbox.LSN
	var news bool
	r.i.w.do(func() {
		to = r.i.settled
		if r.handed <= to && r.row == 0 {
			to = max(to, r.offered)
		}
		news = r.slot.active == r.walsender && to > r.slot.confirmed
	})
	if !news {
		return nil
	}
	return command(ctx, r.i, "Source.Status", func() error {
		if r.slot.active != r.walsender || r.i.w.pg.slot != r.slot {
			return slotTrouble(outbox.ReasonConnection)
		}
		r.i.w.pg.confirm(to)
		return nil
	})
}

// slot is the replication slot.
type slot struct {
	w                  *world
	confirmed, restart outbox.LSN
	lost               bool
	active             *walsender
}

// walsender is a server's end of a stream.
type walsender struct {
	of   *instance
	slot *slot
	gone chan struct{}
	// ghost: its client does not know that it exists.
	ghost bool
}

// end ends the walsender. The caller holds mu.
func (s *walsender) end() {
	if s.slot.active == s {
		s.slot.active = nil
		close(s.gone)
	}
}

// follow releases the WAL up to the confirmed position, or up to the beginning of the oldest open transaction.
func (s *slot) follow() {
	to := s.confirmed
	for _, tx := range s.w.pg.running {
		to = min(to, tx.begun)
	}
	s.restart = max(s.restart, to)
}

// moved looks at what the slot has passed without streaming it: a row that is not visible is lost to a sweep that ends
// now, so it has to be known what to wait for.
func (pg *postgres) passed(how string) {
	for _, tx := range pg.log {
		if tx.end > pg.slot.confirmed || tx.ended {
			continue
		}
		for _, r := range tx.rows {
			if pg.owed(r) && pg.state.Barrier <= tx.xid {
				pg.w.wrongly("the slot is %s past row %d, which nobody sees; barrier %d", how, r.Seq, pg.state.Barrier)
			}
		}
	}
}

// streamed checks, when a stream begins, whether it begins after rows that are still unsettled.
func (pg *postgres) streamed() {
	for _, tx := range pg.log {
		for _, r := range tx.rows {
			if tx.end <= pg.slot.confirmed && pg.owed(r) && !r.unstreamed {
				pg.w.wrongly("the stream begins at %v, behind row %d, which is owed", pg.slot.confirmed, r.Seq)
			}
		}
	}
}

// confirm moves the slot for a stream that says that everything up to there is settled.
func (pg *postgres) confirm(to outbox.LSN) {
	pg.behind("the slot is confirmed to", pg.slot.confirmed, to)
	pg.slot.confirmed = max(pg.slot.confirmed, to)
}

// behind looks whether everything that was streamed between two positions is held by marks.
func (pg *postgres) behind(how string, from, to outbox.LSN) {
	for _, tx := range pg.log {
		for _, r := range tx.rows {
			if tx.end > from && tx.end <= to && !r.deleted && !r.unstreamed && !pg.held(r) {
				pg.w.wrongly("%s %v, and no mark holds row %d", how, to, r.Seq)
			}
		}
	}
}

// moveSlot simulates another program: it moves the slot to the end of the WAL, unless the slot is streamed.
func (w *world) moveSlot() {
	if pg := w.pg; pg.slot != nil && pg.slot.active == nil {
		pg.slot.confirmed = pg.wal
	}
}

// dropSlot too.
func (w *world) dropSlot() {
	if s := w.pg.slot; s != nil {
		if s.active != nil {
			s.active.end()
		}
		w.pg.slot = nil
	}
}
