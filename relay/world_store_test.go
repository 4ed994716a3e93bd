package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"posthaste/outbox"
)

// memStore is an instance's Store.
type memStore struct{ i *instance }

var _ outbox.Store = memStore{}

func (s memStore) pg() *postgres { return s.i.w.pg }

// nothing is the result of a call that has none.
type nothing = struct{}

func (s memStore) Register(ctx context.Context) error {
	_, err := call(ctx, s.i, "Store.Register", func() (nothing, error) { return nothing{}, nil })
	return err
}

func (s memStore) State(ctx context.Context) (outbox.State, error) {
	return call(ctx, s.i, "Store.State", func() (outbox.State, error) { return s.pg().state, nil })
}

func (s memStore) Adopt(ctx context.Context, a outbox.Adoption) (bool, error) {
	return call(ctx, s.i, "Store.Adopt", func() (bool, error) { return s.pg().adopt(a), nil })
}

func (s memStore) CountLosses(ctx context.Context) ([]outbox.Loss, error) {
	return call(ctx, s.i, "Store.CountLosses", func() ([]outbox.Loss, error) {
		found := s.pg().uncounted
		s.pg().uncounted = nil
		return found, nil
	})
}

func (s memStore) SetActive(
	ctx context.Context, epoch int64, active outbox.Mode, h outbox.LSN, degraded string,
) (bool, error) {
	return call(ctx, s.i, "Store.SetActive", func() (bool, error) {
		st := &s.pg().state
		if st.Owner.Epoch != epoch {
			return false, nil
		}
		st.Active, st.Degraded = active, degraded
		if h != 0 {
			st.Handover = h
		}
		s.i.w.grow(50)
		return true, nil
	})
}

func (s memStore) Streams(ctx context.Context) ([]string, error) {
	return call(ctx, s.i, "Store.Streams", func() ([]string, error) { return slices.Clone(s.pg().streams), nil })
}

func (s memStore) Delivered(ctx context.Context) (bool, error) {
	return call(ctx, s.i, "Store.Delivered", func() (bool, error) { return len(s.pg().history) > 0, nil })
}

func (s memStore) Lost(ctx context.Context) (int64, error) {
	return call(ctx, s.i, "Store.Lost", func() (int64, error) { return int64(len(s.pg().suspected)), nil })
}

func (s memStore) NoteStream(ctx context.Context, stream string, _ int64) error {
	_, err := call(ctx, s.i, "Store.NoteStream", func() (nothing, error) {
		if !slices.Contains(s.pg().streams, stream) {
			s.pg().streams = append(s.pg().streams, stream)
		}
		return nothing{}, nil
	})
	return err
}

func (s memStore) InsertLSN(ctx context.Context) (outbox.LSN, error) {
	return call(ctx, s.i, "Store.InsertLSN", func() (outbox.LSN, error) { return s.pg().wal, nil })
}

func (s memStore) Mark(ctx context.Context) (outbox.LSN, uint64, error) {
	m, err := call(ctx, s.i, "Store.Mark", func() (slotTarget, error) {
		pg := s.pg()
		m := slotTarget{pg.wal, pg.xid}
		pg.xid++
		s.i.w.grow(20)
		return m, nil
	})
	return m.lsn, m.xid, err
}

func (s memStore) VisibleBelow(ctx context.Context, xid uint64) (bool, error) {
	return call(ctx, s.i, "Store.VisibleBelow", func() (bool, error) { return s.pg().oldest() >= xid, nil })
}

func (s memStore) RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error {
	_, err := call(ctx, s.i, "Store.RaiseBarrier", func() (nothing, error) {
		st := &s.pg().state
		switch {
		case st.Owner.Epoch != epoch:
			return nothing{}, outbox.ErrSuperseded
		case known && st.Barrier == outbox.BarrierUnknown:
			st.Barrier = xid
		default:
			st.Barrier = max(st.Barrier, xid)
		}
		return nothing{}, nil
	})
	return err
}

func (s memStore) LowerBarrier(ctx context.Context, epoch int64, xid uint64) error {
	_, err := call(ctx, s.i, "Store.LowerBarrier", func() (nothing, error) {
		st := &s.pg().state
		if st.Owner.Epoch == epoch && (st.Barrier <= xid || st.Barrier == outbox.BarrierUnknown) {
			st.Barrier = 0
		}
		return nothing{}, nil
	})
	return err
}

func (s memStore) Lookup(ctx context.Context, rows []*outbox.Row) (outbox.Found, error) {
	return call(ctx, s.i, "Store.Lookup", func() (outbox.Found, error) {
		f := outbox.Found{Rows: make([]bool, len(rows)), Snapshot: s.pg().snapshot()}
		for n, r := range rows {
			f.Rows[n] = s.pg().find(r.Seq, r.ID, partOf(r.AggregateID)) != nil
		}
		return f, nil
	})
}

func (s memStore) Settle(ctx context.Context, items []outbox.Settlement) (outbox.Found, error) {
	items = slices.Clone(items)
	return call(ctx, s.i, "Store.Settle", func() (outbox.Found, error) {
		return s.remove(items, func(it outbox.Settlement) []int { return []int{partOf(it.AggregateID)} })
	})
}

func (s memStore) DeleteAnywhere(ctx context.Context, items []outbox.Settlement) (outbox.Found, error) {
	items = slices.Clone(items)
	return call(ctx, s.i, "Store.DeleteAnywhere", func() (outbox.Found, error) {
		all := make([]int, outbox.Partitions)
		for p := range all {
			all[p] = p
		}
		return s.remove(items, func(outbox.Settlement) []int { return all })
	})
}

func (s memStore) remove(items []outbox.Settlement, parts func(outbox.Settlement) []int) (outbox.Found, error) {
	pg := s.pg()
	f := outbox.Found{Rows: make([]bool, len(items)), Snapshot: pg.snapshot()}
	rows := make([]*tableRow, len(items))
	for n, it := range items {
		if rows[n] = pg.find(it.Seq, it.ID, parts(it)...); rows[n] != nil && rows[n].by != nil {
			return outbox.Found{}, errLocked
		}
	}
	for n, r := range rows {
		if f.Rows[n] = r != nil && !r.gone; f.Rows[n] {
			pg.deliver(r, items[n].Stream, items[n].EntryID)
		}
	}
	s.i.w.grow(50)
	return f, nil
}

func (s memStore) Park(
	ctx context.Context, o outbox.Owner, row *outbox.Row, class, reason string, attempts int,
) (outbox.Found, error) {
	return call(ctx, s.i, "Store.Park", func() (outbox.Found, error) {
		pg := s.pg()
		if pg.state.Owner != o {
			return outbox.Found{}, outbox.ErrSuperseded
		}
		f := outbox.Found{Rows: make([]bool, 1), Snapshot: pg.snapshot()}
		r := pg.find(row.Seq, row.ID, partOf(row.AggregateID))
		if r != nil && r.by != nil {
			return outbox.Found{}, errLocked
		}
		if f.Rows[0] = r != nil; r != nil {
			pg.park(r, class, reason, attempts)
		}
		return f, nil
	})
}

func (s memStore) Audit(ctx context.Context) (outbox.AuditMark, error) {
	return call(ctx, s.i, "Store.Audit", func() (outbox.AuditMark, error) {
		m := outbox.AuditMark{LSN: s.pg().wal, Flushed: s.pg().wal, First: map[int16]int64{}}
		for p := range s.pg().parts {
			if rows := s.pg().visible(p); len(rows) > 0 {
				m.First[int16(p)] = rows[0].Seq //nolint:gosec // 16 of them
			}
		}
		return m, nil
	})
}

func (s memStore) Backlog(ctx context.Context) (int64, time.Duration, error) {
	n, err := call(ctx, s.i, "Store.Backlog", func() (int, error) {
		return s.pg().rows(func(r *tableRow) bool { return r.tx.ended }), nil
	})
	return int64(n), 0, err
}

func (s memStore) Parked(ctx context.Context) ([]outbox.Dead, error) {
	return call(ctx, s.i, "Store.Parked", func() ([]outbox.Dead, error) { return slices.Clone(s.pg().dead), nil })
}

func (s memStore) Housekeep(ctx context.Context) (int64, error) {
	return call(ctx, s.i, "Store.Housekeep", func() (int64, error) { return int64(len(s.pg().dead)), nil })
}

func (s memStore) KeepHistory(ctx context.Context) error {
	_, err := call(ctx, s.i, "Store.KeepHistory", func() (nothing, error) { return nothing{}, nil })
	return err
}

// memLocks is an instance's Locker.
type memLocks struct{ i *instance }

var _ outbox.Locker = memLocks{}

func (l memLocks) Open(ctx context.Context) (outbox.LockSession, error) {
	s, err := call(ctx, l.i, "Locks.Open", func() (*lockSession, error) {
		s := &lockSession{i: l.i, lost: make(chan struct{})}
		l.i.session = s
		return s, nil
	})
	if err != nil {
		return nil, err // a nil session in an interface is no nil
	}
	return s, nil
}

// lockSession is a LockSession. The server may have ended it before its process notices.
type lockSession struct {
	i       *instance
	ended   bool // on the server
	noticed bool
	lost    chan struct{}
}

// end gives back what the session holds. The caller holds mu.
func (s *lockSession) end() {
	pg := s.i.w.pg
	s.ended = true
	if pg.leader == s {
		pg.leader = nil
	}
	if pg.alone == s {
		pg.alone, pg.alones = nil, 0
	}
	delete(pg.sharing, s)
}

// notice tells the process. The caller holds mu.
func (s *lockSession) notice() {
	if s != nil && !s.noticed {
		s.noticed = true
		close(s.lost)
	}
}

// ask is one statement on the session. An error ends it: nobody knows what is left of it.
func (s *lockSession) ask(ctx context.Context, name string, effect func(pg *postgres) bool) (bool, error) {
	ok, err := call(ctx, s.i, name, func() (bool, error) {
		if s.ended {
			return false, errGone
		}
		return effect(s.i.w.pg), nil
	})
	if err == nil {
		return ok, nil
	}
	s.i.w.mu.Lock()
	defer s.i.w.mu.Unlock()
	s.notice()
	return false, fmt.Errorf("lock session: %w", err)
}

func (s *lockSession) TryLead(ctx context.Context) (bool, error) {
	return s.ask(ctx, "Locks.TryLead", func(pg *postgres) bool {
		if pg.leader == nil {
			pg.leader = s
		}
		return pg.leader == s
	})
}

func (s *lockSession) TryPipe(ctx context.Context, exclusive bool) (bool, error) {
	return s.ask(ctx, "Locks.TryPipe", func(pg *postgres) bool {
		others := len(pg.sharing)
		if pg.sharing[s] > 0 {
			others--
		}
		switch {
		case pg.alone != nil && pg.alone != s, exclusive && others > 0:
			return false
		case exclusive:
			pg.alone, pg.alones = s, pg.alones+1
		default:
			pg.sharing[s]++
		}
		return true
	})
}

var errNotHeld = errors.New("you do not own a lock")

func (s *lockSession) DropPipe(ctx context.Context, exclusive bool) error {
	_, err := s.ask(ctx, "Locks.DropPipe", func(pg *postgres) bool {
		switch {
		case exclusive && pg.alone == s:
			if pg.alones--; pg.alones == 0 {
				pg.alone = nil
			}
		case !exclusive && pg.sharing[s] > 0:
			if pg.sharing[s]--; pg.sharing[s] == 0 {
				delete(pg.sharing, s)
			}
		default:
			s.i.w.wrongly("%v", errNotHeld)
		}
		return true
	})
	return err
}

func (s *lockSession) Lost() <-chan struct{} { return s.lost }

func (s *lockSession) Close() {
	s.i.awake()
	s.i.w.mu.Lock()
	defer s.i.w.mu.Unlock()
	if !s.i.isDead() { // else the server finds out
		s.end()
	}
}
