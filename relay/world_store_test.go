package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

// memStore is an instance's Store.
type memStore struct{ i *instance }

var _ Store = memStore{}

func (s memStore) pg() *postgres { return s.i.w.pg }

func (s memStore) Register(ctx context.Context) error {
	return command(ctx, s.i, "Store.Register", func() error { return nil })
}

func (s memStore) State(ctx context.Context) (outbox.State, error) {
	return call(ctx, s.i, "Store.State", func() (outbox.State, error) { return s.pg().state, nil })
}

func (s memStore) Adopt(ctx context.Context, a outbox.Adoption) (bool, error) {
	return call(ctx, s.i, "Store.Adopt", func() (bool, error) { return s.pg().adopt(a), nil })
}

func (s memStore) CountMissing(
	ctx context.Context, tail func(ctx context.Context, stream, after string) ([]outbox.Entry, error),
) ([]outbox.Report, error) {
	if _, err := tail(ctx, "outbox.order", ""); err != nil {
		return nil, err
	}
	return call(ctx, s.i, "Store.CountMissing", func() ([]outbox.Report, error) {
		found := s.pg().uncounted
		s.pg().uncounted = nil
		return found, nil
	})
}

func (s memStore) Repairs(ctx context.Context, _ time.Duration) ([]outbox.Repair, error) {
	return call(ctx, s.i, "Store.Repairs", func() ([]outbox.Repair, error) {
		list := slices.Clone(s.pg().repairs)
		for i := range list {
			list[i].Groups = s.pg().groups[list[i].Stream]
		}
		return list, nil
	})
}

func (s memStore) Log(ctx context.Context, r outbox.Repair, visit func(page []outbox.Logged) error) error {
	all, err := call(ctx, s.i, "Store.Log", func() (list []outbox.Logged, _ error) {
		pg := s.pg()
		for _, row := range pg.rows(func(row *tableRow) bool {
			return r.To > 0 && row.tx.ended && pg.held(row) && !pg.parked(row) &&
				pg.stream(row) == r.Stream
		}) {
			part := int16(row.part)
			list = append(list, outbox.Logged{ID: row.ID, Mark: 1, Part: part, Seq: row.Seq})
		}
		return list, nil
	})
	if err != nil {
		return err
	}
	for page := range slices.Chunk(all, 2*batchEvents) {
		if err := visit(page); err != nil {
			return err
		}
	}
	return nil
}

func (s memStore) Events(ctx context.Context, list []outbox.Logged) (events []*outbox.Record, used int, err error) {
	events, err = call(ctx, s.i, "Store.Events", func() (events []*outbox.Record, _ error) {
		used = min(len(list), batchEvents+1)
		for _, l := range list[:used] {
			for _, row := range s.pg().rows(func(row *tableRow) bool { return row.ID == l.ID }) {
				events = append(events, &row.Record)
			}
		}
		return events, nil
	})
	return events, used, err
}

func (s memStore) Owed(ctx context.Context, stream string, visit func(id uuid.UUID)) error {
	ids, err := call(ctx, s.i, "Store.Owed", func() (ids []uuid.UUID, _ error) {
		for _, row := range s.pg().rows(s.pg().waits) {
			if s.pg().stream(row) == stream {
				ids = append(ids, row.ID)
			}
		}
		return ids, nil
	})
	for _, id := range ids {
		visit(id)
	}
	return err
}

func (s memStore) Restoring(ctx context.Context, r outbox.Repair, restored int64) error {
	return command(ctx, s.i, "Store.Restoring", func() error {
		for i := range s.pg().repairs {
			if p := &s.pg().repairs[i]; p.Stream == r.Stream {
				p.Begun, p.Restored = true, restored
			}
		}
		return nil
	})
}

func (s memStore) Repaired(ctx context.Context, o outbox.Owner, r outbox.Repair, _ outbox.Repaired) error {
	return command(ctx, s.i, "Store.Repaired", func() error {
		pg := s.pg()
		if pg.state.Owner != o {
			return outbox.ErrSuperseded
		}
		if s.i.w.rd.restored[r.Stream] {
			s.i.w.wrongly("%s is recorded as whole before the sink has confirmed what was restored", r.Stream)
		}
		pg.repairs = slices.DeleteFunc(pg.repairs, func(p outbox.Repair) bool { return p.Stream == r.Stream })
		return nil
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
		s.pg().writes()
		return true, nil
	})
}

func (s memStore) Streams(ctx context.Context) ([]outbox.Stream, error) {
	return call(ctx, s.i, "Store.Streams", func() ([]outbox.Stream, error) { return slices.Clone(s.pg().streams), nil })
}

func (s memStore) Delivered(ctx context.Context) (bool, error) {
	return call(ctx, s.i, "Store.Delivered", func() (bool, error) { return s.pg().delivered, nil })
}

// Newest names nothing: the gates of this Redis know what the marks do.
func (s memStore) Newest(ctx context.Context) (map[string]string, error) {
	return call(ctx, s.i, "Store.Newest", func() (map[string]string, error) { return s.i.w.rd.noted, nil })
}

func (s memStore) Missing(ctx context.Context) (missing, phantoms int64, err error) {
	err = command(ctx, s.i, "Store.Missing", func() error {
		missing = int64(len(s.pg().suspected))
		return nil
	})
	return missing, 0, err
}

func (s memStore) NoteStream(ctx context.Context, stream, base string, epoch int64) (bool, error) {
	return call(ctx, s.i, "Store.NoteStream", func() (bool, error) {
		if s.pg().state.Owner.Epoch != epoch {
			return false, outbox.ErrSuperseded
		}
		i := slices.IndexFunc(s.pg().streams, func(o outbox.Stream) bool { return o.Name == stream })
		switch {
		case i < 0:
			s.pg().streams = append(s.pg().streams, outbox.Stream{Name: stream, Base: base})
		case s.pg().streams[i].Base != base:
			return false, &outbox.TakenError{Stream: stream, Base: s.pg().streams[i].Base}
		}
		return s.pg().gated[stream], nil
	})
}

func (s memStore) Ungated(ctx context.Context) ([]string, error) {
	return call(ctx, s.i, "Store.Ungated", func() (list []string, _ error) {
		for _, stream := range s.pg().streams {
			if !s.pg().gated[stream.Name] {
				list = append(list, stream.Name)
			}
		}
		return list, nil
	})
}

func (s memStore) NoteGroups(ctx context.Context, epoch int64, groups map[string][]string) error {
	return command(ctx, s.i, "Store.NoteGroups", func() error {
		if s.pg().state.Owner.Epoch == epoch {
			maps.Copy(s.pg().groups, groups)
		}
		return nil
	})
}

func (s memStore) Gated(ctx context.Context, streams []string) error {
	return command(ctx, s.i, "Store.Gated", func() error {
		for _, stream := range streams {
			s.pg().gated[stream] = true
		}
		return nil
	})
}

func (s memStore) CheckLayout(ctx context.Context, shards int) error {
	return command(ctx, s.i, "Store.CheckLayout", func() error {
		if shards == impossibleShards && !s.pg().impossibleLater {
			return errImpossible
		}
		return nil
	})
}

// impossibleShards is a number of streams that a type cannot have.
const impossibleShards = 8

var errImpossible = fmt.Errorf("%w: it is impossible", outbox.ErrLayout)

func (s memStore) ChangeLayout(ctx context.Context, o outbox.Owner, to outbox.Layout) error {
	return command(ctx, s.i, "Store.ChangeLayout", func() error {
		if to.Shards == impossibleShards {
			return errImpossible
		}
		return s.pg().changeLayout(o, to)
	})
}

func (s memStore) FirstLayout(ctx context.Context, o outbox.Owner, prefix string) (bool, error) {
	return call(ctx, s.i, "Store.FirstLayout", func() (bool, error) {
		pg := s.pg()
		if pg.state.Owner != o {
			return false, outbox.ErrSuperseded
		}
		if len(pg.streams) > 0 {
			return false, nil
		}
		pg.state.Prefix = prefix
		return true, nil
	})
}

func (s memStore) AwaitLayout(ctx context.Context) error {
	return command(ctx, s.i, "Store.AwaitLayout", func() error {
		if s.pg().unawaited {
			return errDown
		}
		return nil
	})
}

func (s memStore) InsertLSN(ctx context.Context) (outbox.LSN, error) {
	return call(ctx, s.i, "Store.InsertLSN", func() (outbox.LSN, error) { return s.pg().wal, nil })
}

func (s memStore) Horizon(ctx context.Context) (outbox.LSN, uint64, error) {
	m, err := call(ctx, s.i, "Store.Horizon", func() (slotTarget, error) {
		pg := s.pg()
		m := slotTarget{pg.wal, pg.xid}
		pg.writes()
		return m, nil
	})
	return m.lsn, m.xid, err
}

func (s memStore) VisibleBelow(ctx context.Context, xid uint64) (bool, error) {
	return call(ctx, s.i, "Store.VisibleBelow", func() (bool, error) { return s.pg().oldest() >= xid, nil })
}

func (s memStore) RaiseBarrier(ctx context.Context, epoch int64, xid uint64, known bool) error {
	return command(ctx, s.i, "Store.RaiseBarrier", func() error {
		st := &s.pg().state
		switch {
		case st.Owner.Epoch != epoch:
			return outbox.ErrSuperseded
		case known && st.Barrier == outbox.BarrierUnknown:
			st.Barrier = xid
		default:
			st.Barrier = max(st.Barrier, xid)
		}
		return nil
	})
}

func (s memStore) LowerBarrier(ctx context.Context, epoch int64, xid uint64) error {
	return command(ctx, s.i, "Store.LowerBarrier", func() error {
		st := &s.pg().state
		if st.Owner.Epoch == epoch && (st.Barrier <= xid || st.Barrier == outbox.BarrierUnknown) {
			st.Barrier = 0
		}
		return nil
	})
}

func (s memStore) BeginPass(ctx context.Context, o outbox.Owner) (outbox.Pass, error) {
	return call(ctx, s.i, "Store.BeginPass", func() (outbox.Pass, error) {
		pass := outbox.Pass{Settled: s.pg().now()}
		err := s.pg().mark(o, &mark{part: -1, pass: pass.Settled})
		pass.End = s.pg().wal
		return pass, err
	})
}

func (s memStore) SettleAll(ctx context.Context, o outbox.Owner, pass outbox.Pass) error {
	return command(ctx, s.i, "Store.SettleAll", func() error {
		pg := s.pg()
		if !slices.ContainsFunc(pg.marks, func(m *mark) bool { return equal(m.pass, pass.Settled) }) {
			pg.w.wrongly("a pass becomes the mark that was never written")
		}
		return pg.mark(o, &mark{part: -1, settled: &pass.Settled})
	})
}

func equal(a, b outbox.Settled) bool {
	return a.High == b.High && a.Snapshot.Max() == b.Snapshot.Max() &&
		slices.Equal(a.Snapshot.Running(), b.Snapshot.Running())
}

func (s memStore) Marker(ctx context.Context) (outbox.Marker, error) {
	m, err := call(ctx, s.i, "Store.Marker", func() (*memMarker, error) {
		return &memMarker{i: s.i, run: s.pg().run}, nil
	})
	if err != nil {
		return nil, err // a nil session in an interface is no nil
	}
	return m, nil
}

// memMarker is a Marker.
type memMarker struct {
	i      *instance
	run    int // of the server
	closed bool
	// seen is what the last look saw.
	seen outbox.Settled
}

func (m *memMarker) Look(ctx context.Context, since outbox.Settled, below uint64) (outbox.Look, error) {
	return call(ctx, m.i, "Marker.Look", func() (look outbox.Look, err error) {
		pg := m.i.w.pg
		if m.closed || m.run != pg.run {
			return look, errGone
		}
		if !slices.ContainsFunc(pg.marks, func(o *mark) bool { return o.settled != nil && equal(*o.settled, since) }) {
			pg.w.wrongly("a look begins at a mark that was never written")
		}
		m.seen = pg.now()
		look.Settled, look.End = m.seen, pg.wal
		seqs, n := map[uint64][]int64{}, 0
		for _, r := range pg.rows(func(r *tableRow) bool { return r.tx.ended && !holds(&since, r) }) {
			if r.tx.xid < below {
				seqs[r.tx.xid] = append(seqs[r.tx.xid], r.Seq)
				n++
			}
		}
		pg.listed = max(pg.listed, n)
		for _, x := range slices.Sorted(maps.Keys(seqs)) {
			look.Owed = append(look.Owed, outbox.Owed{XID: x, Seqs: seqs[x]})
		}
		return look, nil
	})
}

var errBehind = errors.New("the newest mark sees what this one does not")

func (m *memMarker) Move(ctx context.Context, o outbox.Owner, to outbox.Settled, entries outbox.Entries) error {
	entries = maps.Clone(entries)
	return command(ctx, m.i, "Marker.Move", func() error {
		pg := m.i.w.pg
		switch {
		case m.run != pg.run:
			return errGone
		case pg.state.Owner != o:
			return outbox.ErrSuperseded
		case m.closed && pg.sees(pg.newest(0), &mark{settled: &to}):
			return errBehind // one that does so before it is given up is seen below
		}
		for x := pg.first; x < pg.xid; x++ {
			if to.Snapshot.Sees(x) && !m.seen.Snapshot.Sees(x) {
				pg.w.wrongly("the mark comes to see transaction %d, which the look did not see", x)
			}
		}
		for stream, id := range entries {
			if id == "" || outbox.CompareIDs(id, entryID(pg.w.rd.ids)) > 0 {
				pg.w.wrongly("entry %q of %s is noted, and never was there", id, stream)
			}
		}
		return pg.mark(o, &mark{part: -1, settled: &to, entries: entries})
	})
}

func (m *memMarker) Close() {
	m.i.w.do(func() { m.closed = true })
}

func (s memStore) Park(
	ctx context.Context, o outbox.Owner, row *outbox.Row, class, reason string, attempts int,
) (parked bool, err error) {
	return call(ctx, s.i, "Store.Park", func() (bool, error) {
		pg := s.pg()
		if pg.state.Owner != o {
			return false, outbox.ErrSuperseded
		}
		for _, tx := range pg.log {
			for _, r := range tx.rows {
				if r.ID != row.ID || r.Seq != row.Seq || !tx.ended {
					continue
				}
				if !r.deleted {
					pg.park(r, class, reason, attempts)
				}
				return true, nil
			}
		}
		return false, nil
	})
}

func (s memStore) Audit(ctx context.Context) (outbox.AuditMark, error) {
	return call(ctx, s.i, "Store.Audit", func() (outbox.AuditMark, error) {
		m := outbox.AuditMark{LSN: s.pg().wal, Flushed: s.pg().wal, First: map[int16]int64{}}
		for p := range s.pg().parts {
			if rows := s.pg().rows(func(r *tableRow) bool { return r.part == p && s.pg().waits(r) }); len(rows) > 0 {
				m.First[int16(p)] = rows[0].Seq
			}
		}
		return m, nil
	})
}

func (s memStore) Backlog(ctx context.Context) (int64, time.Duration, error) {
	n, err := call(ctx, s.i, "Store.Backlog", func() (int, error) {
		return len(s.pg().rows(s.pg().waits)), nil
	})
	return int64(n), time.Minute, err
}

func (s memStore) Parked(ctx context.Context) ([]outbox.Dead, error) {
	return call(ctx, s.i, "Store.Parked", func() ([]outbox.Dead, error) { return slices.Clone(s.pg().dead), nil })
}

func (s memStore) LeaderSession(context.Context) (outbox.LeaderSession, error) {
	return s.i.w.pg.leaderSession, nil
}

func (s memStore) EndSession(_ context.Context, pid int) error {
	s.i.w.pg.endedSessions = append(s.i.w.pg.endedSessions, pid)
	return nil
}

func (memStore) Sound(context.Context) error { return nil }

func (s memStore) Housekeep(ctx context.Context) (int64, error) {
	return call(ctx, s.i, "Store.Housekeep", func() (int64, error) { return int64(len(s.pg().dead)), nil })
}

func (s memStore) KeepHistory(ctx context.Context) error {
	return command(ctx, s.i, "Store.KeepHistory", func() error { return nil })
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
	// sinkless is what TellSink has shown.
	sinkless bool
	lost     chan struct{}
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

// ask is one statement on the session. An error ends the session, whose state is then unknown.
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

func (s *lockSession) TellSink(ctx context.Context, reached bool) error {
	_, err := s.ask(ctx, "Locks.TellSink", func(*postgres) bool {
		s.sinkless = !reached
		return true
	})
	return err
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
