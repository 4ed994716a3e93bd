package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// loss is the part of posthaste status --json about lost events.
type loss struct {
	Stream, Remedy string
	Missing        int64
}

// losses reads the lost events, after the relay has counted them.
func (w *world) losses() []loss {
	w.t.Helper()
	w.waitHas(0, "SELECT count(*) FROM outbox_reconcile WHERE NOT told")
	var st struct{ Reconciled []loss }
	w.once("status", "--json").json(w.t, &st)
	return slices.DeleteFunc(st.Reconciled, func(l loss) bool { return l.Missing == 0 })
}

func (w *world) lostNothing() {
	w.t.Helper()
	if list := w.losses(); len(list) > 0 {
		w.t.Errorf("lost: %+v", list)
	}
}

// missing counts the load's events that are settled and not in the stream. It reads the stream last: events settled in
// between are not missing.
func (w *world) missing() (n int64) {
	w.t.Helper()
	settled := testenv.Value[[]string](w.t, w.db, "SELECT array_agg(id::text) FROM outbox_history")
	there := map[string]bool{}
	for _, e := range w.oracle.Entries(w.t, "order") {
		there[e.ID] = true
	}
	for _, id := range settled {
		if !there[id] {
			n++
		}
	}
	return n
}

// settled returns the number of settled events.
func (w *world) settled() int64 {
	w.t.Helper()
	return testenv.Value[int64](w.t, w.db, "SELECT count(*) FROM outbox_history")
}

// waitSettled waits until n events are settled. Events that are not settled would be published again after a loss in
// Redis, without counting as lost.
func (w *world) waitSettled(n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, 60*time.Second, func() error {
		have := w.settled()
		return testenv.FailIf(have < n, "%d events are settled, want %d", have, n)
	})
}

// waitWhole waits until no settled event is missing.
func (w *world) waitWhole() {
	w.t.Helper()
	testenv.Eventually(w.t, 30*time.Second, func() error {
		n := w.missing()
		return testenv.FailIf(n > 0, "%d events are missing", n)
	})
}

// unrepaired counts the recorded repairs that are not done yet.
func (w *world) unrepaired() int {
	w.t.Helper()
	return testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_reconcile WHERE done_at IS NULL")
}

// noticed checks that the relay reports the exact number of lost events with a remedy, and runs the remedy.
func (w *world) noticed(r *child, least int64) {
	w.t.Helper()
	want := w.missing()
	if want < least {
		w.t.Fatalf("%d events are lost, want at least %d: not the case", want, least)
	}
	list := w.losses()
	sum := int64(0)
	for _, l := range list {
		if l.Stream != "outbox.order" {
			w.t.Errorf("lost of %q", l.Stream)
		}
		sum += l.Missing
	}
	w.t.Logf("%d events are lost, told in %d parts", want, len(list))
	if sum != want {
		w.t.Errorf("%d events are said to be lost, %d are", sum, want)
	}
	if n := r.value("outbox_lost_events_total"); int64(n) != sum {
		w.t.Errorf("outbox_lost_events_total is %v, want %d", n, sum)
	}
	w.once("status").says(w.t, 0, "broken: Redis lost", "posthaste replay --stream=outbox.order")
	for _, l := range list {
		args, ok := strings.CutPrefix(l.Remedy, "posthaste ")
		if !ok {
			w.t.Fatalf("remedy %q", l.Remedy)
		}
		w.once(append(strings.Fields(args), "--rate=0")...).says(w.t, 0)
	}
	if n := w.missing(); n != 0 {
		w.t.Errorf("%d events are missing still", n)
	}
	w.lostNothing()
}

// restored checks that nothing is missing, that at least least events were published again, and that no loss is
// reported.
func (w *world) restored(least int64) {
	w.t.Helper()
	again := testenv.Value[int64](w.t, w.db,
		"SELECT coalesce(sum(restored), 0)::bigint FROM outbox_reconcile WHERE done_at IS NOT NULL")
	if n := w.missing(); n != 0 || again < least {
		w.t.Errorf("%d events are missing; %d were restored, want at least %d", n, again, least)
	}
	w.lostNothing()
	w.t.Logf("%d events were restored", again)
}

// Redis with its default of one sync a second runs on a slow disk. It acknowledges writes that are not yet on disk, and
// is killed. The lost events are published again, in both modes, before any newer event.
func TestRedisKilledInTheMiddleOfASync(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := worldOf(t, testenv.Postgres(t), testenv.RedisOnASlowDisk(t, 1800*time.Millisecond))
		w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		restored := func() int {
			return testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_reconcile WHERE restored > 0")
		}
		for n := 0; n < 3 || n < 20 && restored() < 2; n++ {
			w.waitCommitted(load, load.Committed()+700) // a sync is running in nine of ten cases
			w.redis.Restart(t)
		}
		w.ended(load)
		w.restored(1)
	})
}

// With a fast disk, a restart of Redis loses nothing, and no loss is reported.
func TestARestartOfRedisIsNoLoss(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, r, load := underLoad(t, mode, 500)
		w.waitCommitted(load, 300)
		w.redis.Restart(t)
		w.waitCommitted(load, load.Committed()+300)
		w.ended(load)
		w.lostNothing()
		gaps := r.value(`outbox_publish_errors_total{class="gap"}`)
		restarts := r.value(`outbox_publish_errors_total{class="restarted"}`)
		if gaps != 0 || restarts == 0 {
			t.Errorf("%v gaps, %v restarts; want none, and some", gaps, restarts)
		}
	})
}

// Redis is restarted, or a stream is deleted and a consumer creates it again, while there is nothing to publish. The
// relay notices without an event.
func TestALossIsNoticedWithoutAnEvent(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := w.wrote(testenv.LoadOptions{Total: 120})
		w.oracle.WaitEmpty(t, 20*time.Second)
		w.redis.Restart(t)
		r.waitLogged("looking whether it has lost")
		w.waitMode(mode)
		w.lostNothing()
		do(t, w.redis.Client, "del", "outbox.order")
		do(t, w.redis.Client, "xgroup", "create", "outbox.order", "g", "0", "mkstream")
		r.waitLogged("the stream is whole again")
		w.waitMode(mode)
		w.oracle.Check(t, load, 20*time.Second)
		if n := w.redis.Client.XInfoGroups(t.Context(), "outbox.order").Val()[0].Lag; n != 120 {
			t.Errorf("the group has %d events to read, want 120", n)
		}
		w.desire("poll") // another adoption restores nothing again
		w.waitMode("poll")
		w.desire(map[string]string{"cdc": "auto", "poll": "poll"}[mode])
		w.waitMode(mode)
		w.oracle.Check(t, load, 20*time.Second)
		w.restored(120)
	})
}

// A replica that was behind takes over and lacks the latest entries. No gate shows that if a part is claimed again for
// each batch.
func TestALaggingReplicaTakesOver(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		replica := testenv.Redis(t, fmt.Sprintf("replicaof 127.0.0.1 %d", w.redis.Port))
		front := testenv.NewLink(t, w.redis.Addr())
		w.rdURL = "redis://" + front.Addr() + "/0"
		w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		w.waitCommitted(load, 500)
		testenv.Eventually(t, 20*time.Second, func() error {
			info := replica.Client.Info(t.Context(), "replication").Val()
			return testenv.FailIf(!strings.Contains(info, "master_link_status:up") ||
				replica.Client.XLen(t.Context(), "outbox.order").Val() == 0, "the replica is not there: %s", info)
		})
		do(t, replica.Client, "replicaof", "127.0.0.1", "1") // disconnects the replica
		w.waitSettled(replica.Client.XLen(t.Context(), "outbox.order").Val() + 200)
		must(t, w.redis.Kill())
		do(t, replica.Client, "replicaof", "no", "one")
		front.To(replica.Addr())
		w.redis.Client, w.oracle.Redis = replica.Client, replica.Client
		w.waitCommitted(load, load.Committed()+300)
		w.ended(load)
		w.restored(100)
	})
}

// Two instances sweep when Redis is restarted. Neither publishes there before the leader has compared the streams with
// the log.
func TestTwoRelaysSweepOverARestartOfRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.desire("poll")
	w.spawn("relay")
	w.waitMode("poll")
	second := w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600})
	second.waitLogged(`"to":"poll"`)
	for range 2 {
		w.waitCommitted(load, load.Committed()+300)
		w.redis.Restart(t)
	}
	w.waitCommitted(load, load.Committed()+300)
	w.ended(load)
	w.lostNothing()
}

func do(tb testing.TB, client redis.UniversalClient, args ...any) {
	tb.Helper()
	if err := client.Do(tb.Context(), args...).Err(); err != nil {
		tb.Fatalf("%v: %v", args, err)
	}
}

// registerOf returns the key of a stream's register.
func registerOf(stream string) string { return "{" + stream + "}:gate" }

// gate returns the key of the gate of the world's database for a stream.
func (w *world) gate(stream string) string {
	w.t.Helper()
	return registerOf(stream) + ":" + testenv.Value[string](w.t, w.db, "SELECT source::text FROM relay_state")
}

// A stream, its gate, its register, or all data in Redis are deleted under a relay. All settled events are published
// again, and none twice. A loss of the gate is counted.
func TestWhatIsDeletedIsRestored(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, r, load := underLoad(t, mode, 500, "--stream-maxlen=0")
		for _, command := range [][]any{
			{"del", "outbox.order"},
			{"del", w.gate("outbox.order")},
			{"del", registerOf("outbox.order")},
			{"flushall"},
			{"unlink", "outbox.order", w.gate("outbox.order"), registerOf("outbox.order")},
		} {
			w.waitSettled(w.settled() + 200)
			do(t, w.redis.Client, command...)
			w.waitCommitted(load, load.Committed()+300)
		}
		w.ended(load)
		w.restored(1000)
		if n := r.value(`outbox_publish_errors_total{class="gap"}`); n < 3 {
			t.Errorf("%v gaps", n)
		}
	})
}

// Redis is emptied repeatedly, while the previous loss is being restored.
func TestALossInTheMiddleOfARestoration(t *testing.T) {
	t.Parallel()
	w, r, load := underLoad(t, "cdc", 2000, "--stream-maxlen=0")
	w.waitSettled(5000)
	for range 3 {
		do(t, w.redis.Client, "flushall")
		w.waitLen("outbox.order", 1000)
	}
	w.ended(load)
	w.restored(5000)
	r.waitReady("")
}

// A stream's key is replaced with a key of another type. Nothing can be restored there; that is reported, and other
// streams continue.
func TestWhatCannotBeRestoredHoldsUpNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc", "--stream-maxlen=0")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500, Types: []string{"order", "user"}})
	w.waitSettled(1000)
	load.Stop()
	w.oracle.WaitEmpty(t, 20*time.Second)
	r.kill()
	do(t, w.redis.Client, "set", "outbox.order", "x")
	do(t, w.redis.Client, "del", "outbox.user")
	r = w.spawn("relay", "--stream-maxlen=0")
	r.waitLogged(`"stream opened"`)
	lost := testenv.Value[int64](t, w.db, "SELECT count(*) FROM outbox WHERE aggregate_type = 'order'")
	if list := w.losses(); len(list) != 1 || list[0].Stream != "outbox.order" || list[0].Missing != lost {
		t.Errorf("told: %+v, want that %d events of outbox.order are lost", list, lost)
	}
	w.hasLen("outbox.user", testenv.Value[int64](t, w.db, "SELECT count(*) FROM outbox WHERE aggregate_type = 'user'"))
	r.waitReady("")
}

// Only the gate is set back to an earlier state, with and without a running relay. The events that the gate lacks are
// in the stream, and are not published again.
func TestAnOldGateIsNoticed(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, r, load := underLoad(t, mode, 500, "--stream-maxlen=0")
		gate := w.gate("outbox.order")
		for n := range 4 {
			w.waitCommitted(load, load.Committed()+300)
			old := w.redis.Client.Dump(t.Context(), gate).Val()
			w.waitCommitted(load, load.Committed()+300)
			if n%2 == 1 {
				r.kill()
			}
			do(t, w.redis.Client, "restore", gate, "0", old, "replace")
			if n%2 == 1 {
				r = w.spawn("relay", "--stream-maxlen=0")
			}
		}
		w.waitCommitted(load, load.Committed()+300)
		w.ended(load)
		w.restored(0)
	})
}

// With --restore=off, lost events are counted and reported, with the command that restores them.
func TestWithoutRestoringALossIsTold(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		for _, command := range [][]any{{"del", "outbox.order"}, {"flushall"}} {
			w := newWorld(t)
			w.oracle.Flushed = true
			r := w.relayIn(mode, "--stream-maxlen=0", "--restore=off")
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
			w.waitSettled(150)
			do(t, w.redis.Client, command...)
			w.waitCommitted(load, load.Committed()+300)
			w.ended(load)
			w.noticed(r, 100)
			r.kill()
		}
	})
}

// forget cuts off the last third of the append-only file of a stopped server. The cut may be anywhere. But if again is
// set, because the server will be restarted more than once, the cut is at the end of a transaction: Redis leaves the
// beginning of a cut transaction in its file, and after a later restart those commands would become part of the next
// transaction.
func forget(tb testing.TB, r *testenv.RedisServer, again bool) {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(r.Dir, "appendonlydir", "*.incr.aof"))
	if err != nil || len(files) != 1 {
		tb.Fatalf("append-only files %v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	must(tb, err)
	end := len(text) / 3 * 2
	if again {
		const exec = "$4\r\nEXEC\r\n"
		end = bytes.LastIndex(text[:end], []byte(exec)) + len(exec)
	}
	must(tb, os.Truncate(files[0], int64(end)))
}

// Redis loses data while no relay runs, and later loses more, including restored events. The next leader restores them
// before it publishes anything, even if it is killed repeatedly while restoring.
func TestALossWhileNobodyLeads(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w, r, load := underLoad(t, mode, 1000, "--stream-maxlen=0")
		for _, again := range []bool{true, true, false} {
			w.waitSettled(w.settled() + 1500)
			r.kill()
			had := w.length("outbox.order")
			must(t, w.redis.Kill())
			forget(t, w.redis, again)
			must(t, w.redis.Start(t.Context()))
			if has := w.length("outbox.order"); has > had-100 {
				t.Fatalf("of %d entries there are %d: nothing to restore", had, has)
			}
			for n := range int64(4) { // killed at an arbitrary point
				there := w.length("outbox.order")
				r = w.spawn("relay", "--stream-maxlen=0")
				testenv.Eventually(t, 15*time.Second, func() error {
					// A statement that a killed relay had sent may have ended the repair since.
					return testenv.FailIf(!r.logged("comparing a stream") && (n == 0 || w.unrepaired() > 0),
						"the relay compares no stream")
				})
				testenv.Eventually(t, 20*time.Second, func() error {
					now := w.length("outbox.order")
					return testenv.FailIf(now < there+100*n && w.unrepaired() > 0, "%d entries, from %d on", now, there)
				})
				r.kill()
				if w.unrepaired() == 0 {
					break
				}
			}
			r = w.spawn("relay", "--stream-maxlen=0")
		}
		w.ended(load)
		w.restored(0) // a killed relay has not recorded all that it restored
	})
}
