package main

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

const sharedOn = "--shared-streams=on"

// sharers are databases that share the streams of one Redis, each with its own load.
type sharers struct {
	t     *testing.T
	all   []*world
	loads []*testenv.Load
}

// newSharers creates two databases on one Postgres server and one on another.
func newSharers(t *testing.T) *sharers {
	t.Helper()
	redis := testenv.Redis(t)
	s := &sharers{t: t}
	for _, db := range []*testenv.Database{
		testenv.Postgres(t), testenv.Postgres(t), testenv.NewServer(t).Database(t),
	} {
		s.all = append(s.all, worldOf(t, db, redis))
	}
	return s
}

// load writes events of the same types to all databases.
func (s *sharers) load(o testenv.LoadOptions) {
	s.loads = nil
	for i, w := range s.all {
		o.Tag, o.Types = fmt.Sprintf("%c%d-", 'a'+i, len(w.oracle.Others)), []string{"order", "user"}
		s.loads = append(s.loads, testenv.StartLoad(s.t, w.db, o))
	}
}

// more waits until each load has committed n more events.
func (s *sharers) more(n int) {
	s.t.Helper()
	for i, w := range s.all {
		w.waitCommitted(s.loads[i], s.loads[i].Committed()+n)
	}
}

// whole waits until every database has noticed the loss and restored its events.
func (s *sharers) whole(done []int) {
	s.t.Helper()
	testenv.Eventually(s.t, 60*time.Second, func() error {
		for i, n := range s.restored() {
			if n <= done[i] {
				return fmt.Errorf("database %c has restored nothing", 'a'+i)
			}
		}
		return nil
	})
}

// restored returns how often each database has restored events.
func (s *sharers) restored() (n []int) {
	for _, w := range s.all {
		n = append(n, testenv.Value[int](s.t, w.db,
			"SELECT count(*) FROM outbox_reconcile WHERE done_at IS NOT NULL AND restored > 0"))
	}
	return n
}

// check ends the loads, and compares each database with the streams.
func (s *sharers) check() {
	s.t.Helper()
	for _, l := range s.loads {
		l.Stop()
	}
	for i, w := range s.all {
		for j, l := range s.loads {
			if i != j {
				w.oracle.Others = append(w.oracle.Others, l)
			}
		}
		w.oracle.Check(s.t, s.loads[i], 30*time.Second)
		w.oracle.Others = append(w.oracle.Others, s.loads[i])
		source, mine := "/posthaste/"+w.db.Relay, map[string]bool{}
		for _, id := range testenv.Value[[]string](s.t, w.db, "SELECT array_agg(id::text) FROM outbox") {
			mine[id] = true
		}
		for _, e := range w.oracle.Entries(s.t, "order", "user") {
			if mine[e.ID] != (e.Source == source) {
				s.t.Fatalf("entry %s has the source %s, and is of %s: %v", e.EntryID, e.Source, source, mine[e.ID])
			}
		}
		if list := w.losses(); len(list) > 0 {
			s.t.Errorf("database %c is told of %+v", 'a'+i, list)
		}
	}
}

// Three databases on two servers publish to the same streams. A fault in one of them does not affect the others, and
// the events of each are in the streams once and in order. After a loss in Redis, each restores its own events.
func TestDatabasesShareStreams(t *testing.T) {
	t.Parallel()
	s := newSharers(t)
	a, b, c := s.all[0], s.all[1], s.all[2]
	firstA, firstB := a.spawn("relay", sharedOn), b.spawn("relay", sharedOn)
	c.desire("poll")
	onlyC := c.spawn("relay", sharedOn)
	s.load(testenv.LoadOptions{Rate: 150})
	a.waitMode("cdc")
	b.waitMode("cdc")
	c.waitMode("poll")
	secondA, secondB := a.spawn("relay", sharedOn), b.spawn("relay", sharedOn)
	secondA.becomes("standby")
	secondB.becomes("standby")
	s.more(60)
	firstA.kill()
	firstB.signal(syscall.SIGSTOP)
	onlyC.setMode("auto")
	secondA.becomes("leader")
	secondB.becomes("leader")
	c.waitMode("cdc")
	s.more(60)
	firstB.signal(syscall.SIGCONT)
	firstB.becomes("standby")
	secondA.setMode("poll")
	a.waitMode("poll")

	for _, w := range s.all { // otherwise there is nothing to restore
		w.waitSettled(100)
	}
	before := s.restored()
	do(t, a.redis.Client, "del", "outbox.order")
	s.whole(before)
	s.more(60)
	if full() {
		before = s.restored()
		do(t, a.redis.Client, "flushall")
		s.whole(before)
		s.more(60)
	}
	secondA.setMode("auto")
	a.waitMode("cdc")
	s.check()
}

// Databases that may not publish to shared streams, and the reports they get.
func TestWhoMayNotShare(t *testing.T) {
	t.Parallel()
	s := newSharers(t)
	c := s.all[2]
	redis := c.redis
	s.load(testenv.LoadOptions{Rate: 150})
	for _, w := range s.all {
		w.relayIn("cdc", sharedOn)
	}
	s.more(60)
	s.check()
	// A database without the setting to share.
	d := worldOf(t, testenv.Postgres(t), redis)
	d.wrote(testenv.LoadOptions{Total: 60, Tag: "d-"})
	d.spawn("relay").waitUnready("--shared-streams")
	// A copy, on another server, of a database that shares: it has the same name.
	copied := worldOf(t, s.dumped(c), redis)
	load := copied.wrote(testenv.LoadOptions{Total: 60, Tag: "copy-"})
	r := copied.spawn("relay", sharedOn)
	r.waitUnready("foreign_stream")
	r.waitUnready("of the same name")
	if n := testenv.Value[int](t, copied.db, "SELECT count(*) FROM outbox_backlog"); n < load.Committed() {
		t.Errorf("%d rows are owed, want %d", n, load.Committed())
	}
	copied.once("doctor", sharedOn).says(t, 1, "another database of the same name")
	s.load(testenv.LoadOptions{Rate: 150})
	s.more(60)
	s.check()
	doctor := c.once("doctor", sharedOn)
	for _, w := range s.all {
		doctor.says(t, doctor.code, "/posthaste/"+w.db.Relay+" (2 streams)")
	}
	c.once("status").says(t, 0, "/posthaste/"+c.db.Relay)
}

// dumped copies a world's database to the server of the others by dump and restore.
func (s *sharers) dumped(w *world) *testenv.Database {
	s.t.Helper()
	to := testenv.Empty(s.t)
	if errOut := restore(s.t, to, dump(s.t, w.db, "--no-publications"), "-v", "ON_ERROR_STOP=1"); errOut != "" {
		s.t.Fatalf("psql: %s", errOut)
	}
	to.Relay = w.db.Relay
	return to
}

// Sharing is turned on and off under load, while relays with either setting are killed. Nothing is lost or published
// twice.
func TestSharingIsTurnedOnAndOffUnderLoad(t *testing.T) {
	t.Parallel()
	redis := testenv.Redis(t)
	a, b := worldOf(t, testenv.Postgres(t), redis), worldOf(t, testenv.Postgres(t), redis)
	load := testenv.StartLoad(t, a.db, testenv.LoadOptions{Rate: 300, Types: []string{"order", "user"}})
	rounds := scale(30, 6)
	for i := range rounds {
		setting := []string{sharedOn, "--shared-streams=off"}[i%2]
		epoch := func() int64 {
			return testenv.Value[int64](t, a.db, "SELECT coalesce((SELECT epoch FROM relay_state), 0)")
		}
		before := epoch() // a relay may lead before spawn returns
		r := a.spawn("relay", setting)
		testenv.Eventually(t, 30*time.Second, func() error {
			now := epoch()
			return testenv.FailIf(now <= before && i%3 < 2, "epoch %d", now)
		})
		if i%3 == 1 {
			r.becomes("leader")
		}
		r.kill()
	}
	ra := a.spawn("relay", sharedOn)
	other := testenv.StartLoad(t, b.db, testenv.LoadOptions{Total: 120, Tag: "b-"})
	rb := b.spawn("relay", sharedOn)
	other.Wait()
	rb.becomes("leader")
	a.oracle.Others, b.oracle.Others = []*testenv.Load{other}, []*testenv.Load{load}
	b.oracle.Check(t, other, 30*time.Second)
	// While b uses the streams, a relay without the setting does not publish.
	ra.kill()
	ra = a.spawn("relay")
	ra.waitUnready("/posthaste/" + b.db.Relay)
	rb.stop()
	left := a.once("streams", "leave", "--source=/posthaste/"+b.db.Relay, "--yes")
	left.says(t, 0, "does not share outbox.order any more")
	ra.becomes("leader")
	a.ended(load)
	again := b.wrote(testenv.LoadOptions{Total: 60, Tag: "again-"})
	b.spawn("relay", sharedOn).waitUnready("does not share it")
	// b takes the streams over by force. a is notified and joins.
	ra.stop()
	b.adopt() // runs without the setting; its relay then adopts again and shares
	b.oracle.Others = append(b.oracle.Others, other)
	b.oracle.Check(t, again, 30*time.Second)
	ra = a.spawn("relay", sharedOn)
	ra.becomes("leader")
	a.oracle.Others = append(a.oracle.Others, load, again)
	a.delivers()
}

// A shared stream is deleted when every database has requested it, and no database restores it.
func TestASharedStreamIsDropped(t *testing.T) {
	t.Parallel()
	redis := testenv.Redis(t)
	all := []*world{worldOf(t, testenv.Postgres(t), redis), worldOf(t, testenv.Postgres(t), redis)}
	var loads []*testenv.Load
	for i, w := range all {
		w.relayIn("cdc", sharedOn)
		load := w.wrote(testenv.LoadOptions{Total: 60, Tag: fmt.Sprintf("%d-", i)})
		w.waitSettled(int64(load.Committed()))
		loads = append(loads, load)
	}
	total := loads[0].Committed() + loads[1].Committed()
	drop := func(w *world, want string) {
		t.Helper()
		w.once("streams", "drop", "--stream=outbox.order", "--yes").says(t, 0, want)
	}
	drop(all[0], "/posthaste/"+all[1].db.Relay)
	all[0].hasLen("outbox.order", int64(total))
	drop(all[1], "is gone")
	for _, w := range all {
		w.waitHas(true, "SELECT count(*) > 0 FROM outbox_reconcile WHERE done_at IS NOT NULL")
		w.waitMode("cdc")
	}
	all[0].hasLen("outbox.order", 0)
	for _, w := range all {
		w.lostNothing()
		load := w.wrote(testenv.LoadOptions{Total: 60, Tag: "later-" + w.db.Relay})
		w.oracle.Others = slices.Concat(w.oracle.Others, loads)
		w.oracle.Check(t, load, 30*time.Second)
		loads = append(loads, load)
	}
}
