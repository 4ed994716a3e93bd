package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// losses is what posthaste status --json tells of what is lost.
type losses []struct {
	Stream, Remedy string
	Events         int64
}

// losses asks for what is lost, once that is counted.
func (w *world) losses() losses {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		if n := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_loss WHERE NOT told"); n > 0 {
			return fmt.Errorf("%d are not counted", n)
		}
		return nil
	})
	r := w.once("status", "--json")
	var st struct{ Losses losses }
	if err := json.Unmarshal([]byte(r.out), &st); err != nil || r.code != 0 {
		w.t.Fatalf("status: exit %d, %v: %s%s", r.code, err, r.out, r.errOut)
	}
	return st.Losses
}

// missing counts the load's events that are settled and not in the stream. It looks at the stream last: what is settled
// in between is not missing.
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

// settled counts what is settled.
func (w *world) settled() int64 {
	w.t.Helper()
	return testenv.Value[int64](w.t, w.db, "SELECT count(*) FROM outbox_history")
}

// waitSettled waits until n events are settled: what is not settled is published again when Redis has forgotten it.
func (w *world) waitSettled(n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		if have := w.settled(); have < n {
			return fmt.Errorf("%d events are settled, want %d", have, n)
		}
		return nil
	})
}

// noticed checks that what is lost is told: exactly, and how to bring it back, which is then done.
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
		sum += l.Events
	}
	w.t.Logf("%d events are lost, told in %d parts", want, len(list))
	if sum != want {
		w.t.Errorf("%d events are said to be lost, %d are", sum, want)
	}
	text, err := r.metrics()
	if n, _ := sample(text, "outbox_lost_events_total"); err != nil || int64(n) != sum {
		w.t.Errorf("outbox_lost_events_total is %v, want %d, %v", n, sum, err)
	}
	if out := w.once("status").out; !strings.HasPrefix(out, "broken: Redis lost") ||
		!strings.Contains(out, "posthaste replay --stream=outbox.order") {
		w.t.Errorf("status: %s", out)
	}
	for _, l := range list {
		args, ok := strings.CutPrefix(l.Remedy, "posthaste ")
		if !ok {
			w.t.Fatalf("remedy %q", l.Remedy)
		}
		if res := w.once(append(strings.Fields(args), "--rate=0")...); res.code != 0 {
			w.t.Fatalf("%s: exit %d: %s", l.Remedy, res.code, res.errOut)
		}
	}
	if n := w.missing(); n != 0 {
		w.t.Errorf("%d events are missing still", n)
	}
	if list := w.losses(); len(list) > 0 {
		w.t.Errorf("brought back, and still told: %+v", list)
	}
}

// Redis with its default of one sync a second, on a slow disk: it acknowledges what it has not written, and is killed.
// That is lost, in both modes, and it is told: how much, and the command that brings it back. The stream goes on in
// order.
func TestRedisKilledInTheMiddleOfASync(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := worldOf(t, testenv.Postgres(t), testenv.RedisOnASlowDisk(t, 1800*time.Millisecond))
		w.oracle.Flushed = true
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		for n := 0; n < 3 || w.missing() == 0; n++ {
			w.waitCommitted(load, load.Committed()+700) // a sync is under way, nine times in ten
			w.redis.Restart(t)
		}
		load.Stop()
		w.oracle.Check(t, load, 30*time.Second)
		w.noticed(r, 1)
	})
}

// A disk that is quick enough loses nothing, and nothing is said to be lost: a restart alone is none of it.
func TestARestartOfRedisIsNoLoss(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		w.waitCommitted(load, 300)
		w.redis.Restart(t)
		w.waitCommitted(load, load.Committed()+300)
		load.Stop()
		w.oracle.Check(t, load, 30*time.Second)
		if list := w.losses(); len(list) > 0 {
			t.Errorf("lost: %+v", list)
		}
		text, err := r.metrics()
		gaps, _ := sample(text, `outbox_publish_errors_total{class="gap"}`)
		restarts, _ := sample(text, `outbox_publish_errors_total{class="restarted"}`)
		if err != nil || gaps != 0 || restarts == 0 {
			t.Errorf("%v gaps, %v restarts, %v; want none, and some", gaps, restarts, err)
		}
	})
}

// Redis is restarted, or a stream deleted that a consumer makes anew, while there is nothing to publish: that is
// noticed without an event.
func TestALossIsNoticedWithoutAnEvent(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.oracle.Flushed = true
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 120})
		load.Wait()
		w.oracle.WaitEmpty(t, 20*time.Second)
		w.redis.Restart(t)
		r.waitLogged("looking whether it has lost")
		w.waitMode(mode, 20*time.Second)
		if list := w.losses(); len(list) > 0 {
			t.Errorf("lost: %+v", list)
		}
		do(t, w.redis.Client, "del", "outbox.order")
		do(t, w.redis.Client, "xgroup", "create", "outbox.order", "g", "0", "mkstream")
		r.waitLogged("the sink has lost events that were settled")
		w.waitMode(mode, 20*time.Second)
		w.desire("poll") // adopting again counts nothing again
		w.waitMode("poll", 20*time.Second)
		w.desire(map[string]string{"cdc": "auto", "poll": "poll"}[mode])
		w.waitMode(mode, 20*time.Second)
		w.noticed(r, 120)
	})
}

// A replica that was behind takes over: what it had not received is gone, which no gate says while a part is claimed
// anew for each batch.
func TestALaggingReplicaTakesOver(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.oracle.Flushed = true
		replica := testenv.Redis(t, fmt.Sprintf("replicaof 127.0.0.1 %d", w.redis.Port))
		front := testenv.NewSwitch(t, w.redis.Addr())
		w.rdURL = "redis://" + front.Addr() + "/0"
		r := w.relayIn(mode, "--stream-maxlen=0")
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
		w.waitCommitted(load, 500)
		caughtUp(t, replica.Client)
		do(t, replica.Client, "replicaof", "127.0.0.1", "1") // cut off
		w.waitSettled(replica.Client.XLen(t.Context(), "outbox.order").Val() + 200)
		if err := w.redis.Kill(); err != nil {
			t.Fatal(err)
		}
		do(t, replica.Client, "replicaof", "no", "one")
		front.To(replica.Addr())
		w.redis.Client, w.oracle.Redis = replica.Client, replica.Client
		w.waitCommitted(load, load.Committed()+300)
		load.Stop()
		w.oracle.Check(t, load, 30*time.Second)
		w.noticed(r, 100)
	})
}

// Two instances sweep when Redis is restarted: neither publishes there before the leader has looked.
func TestTwoRelaysSweepOverARestartOfRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.desire("poll")
	w.spawn("relay")
	w.waitMode("poll", 20*time.Second)
	second := w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 600})
	second.waitLogged(`"to":"poll"`)
	for range 2 {
		w.waitCommitted(load, load.Committed()+300)
		w.redis.Restart(t)
	}
	w.waitCommitted(load, load.Committed()+300)
	load.Stop()
	w.oracle.Check(t, load, 30*time.Second)
	if list := w.losses(); len(list) > 0 {
		t.Errorf("lost: %+v", list)
	}
}

// caughtUp waits until a replica has everything.
func caughtUp(tb testing.TB, client *redis.Client) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		info := client.Info(tb.Context(), "replication").Val()
		if !strings.Contains(info, "master_link_status:up") || client.XLen(tb.Context(), "outbox.order").Val() == 0 {
			return fmt.Errorf("the replica is not there: %s", info)
		}
		return nil
	})
}

func do(tb testing.TB, client *redis.Client, args ...any) {
	tb.Helper()
	if err := client.Do(tb.Context(), args...).Err(); err != nil {
		tb.Fatalf("%v: %v", args, err)
	}
}

// Somebody deletes one stream, or the whole of Redis, under a relay: the gate alone may still be there. Everything of
// it that was settled is told.
func TestADeletedStreamIsNoticed(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		for _, command := range []string{"del outbox.order", "flushall"} {
			w := newWorld(t)
			w.oracle.Flushed = true
			r := w.relayIn(mode, "--stream-maxlen=0")
			load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
			w.waitSettled(150)
			words := []any{}
			for word := range strings.FieldsSeq(command) {
				words = append(words, word)
			}
			do(t, w.redis.Client, words...)
			w.waitCommitted(load, load.Committed()+300)
			load.Stop()
			w.oracle.Check(t, load, 30*time.Second)
			w.noticed(r, 100)
			r.kill()
		}
	})
}

// forget cuts the last third off what a server that has stopped has on its disk.
func forget(tb testing.TB, r *testenv.RedisServer) {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(r.Dir, "appendonlydir", "*.incr.aof"))
	if err != nil || len(files) != 1 {
		tb.Fatalf("append-only files %v, %v", files, err)
	}
	info, err := os.Stat(files[0])
	if err == nil {
		err = os.Truncate(files[0], info.Size()/3*2)
	}
	if err != nil {
		tb.Fatal(err)
	}
}

// Redis forgets while no relay runs: the next leader looks before it publishes, once.
func TestALossWhileNobodyLeads(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.oracle.Flushed = true
	r := w.relayIn("cdc", "--stream-maxlen=0")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 500})
	w.waitSettled(1000)
	r.kill()
	if err := w.redis.Kill(); err != nil {
		t.Fatal(err)
	}
	load.Stop()
	forget(t, w.redis)
	if err := w.redis.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second finds nothing new
		r = w.spawn("relay", "--stream-maxlen=0")
		r.waitLogged(`"stream opened"`)
		w.oracle.Check(t, load, 30*time.Second)
		if list, want := w.losses(), w.missing(); len(list) != 1 || list[0].Events != want || want == 0 {
			t.Errorf("told %+v, and %d events are lost", list, want)
		}
		r.stop()
	}
}

// replicated is a world whose Postgres has a standby.
type replicated struct {
	*world
	server, standby *testenv.Server
	// link is how the standby hears of the server, front where everybody looks for the primary.
	link, front *testenv.Switch
}

func newReplicated(t *testing.T, mode string) *replicated {
	t.Helper()
	server := testenv.NewServer(t)
	r := &replicated{world: worldOf(t, server.Database(t), testenv.Redis(t)), server: server}
	r.link = testenv.NewSwitch(t, hostOf(t, server.URL("")))
	r.standby = server.Standby(t, r.link.Addr())
	r.front = testenv.NewSwitch(t, hostOf(t, server.URL("")))
	r.pgURL = strings.Replace(r.db.URL, hostOf(t, r.db.URL), r.front.Addr(), 1)
	r.desire(map[string]string{"cdc": "auto", "poll": "poll"}[mode])
	return r
}

// other is the database of the standby.
func (r *replicated) other() *testenv.Database {
	r.t.Helper()
	d := *r.db
	d.URL = strings.Replace(r.db.URL, hostOf(r.t, r.db.URL), hostOf(r.t, r.standby.URL("")), 1)
	var err error
	if d.Pool, err = pgxpool.New(r.t.Context(), d.URL); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(d.Pool.Close)
	return &d
}

// promote has the standby take over from a server that is killed. Its database is that of the world from then on.
func (r *replicated) promote(other *testenv.Database) {
	r.t.Helper()
	if err := r.server.Stop("immediate"); err != nil {
		r.t.Fatal(err)
	}
	if _, err := other.Pool.Exec(r.t.Context(), "SELECT pg_promote()"); err != nil {
		r.t.Fatal(err)
	}
	r.front.To(hostOf(r.t, r.standby.URL("")))
	r.db, r.oracle.DB, r.oracle.MayRepeat = other, other, true
}

// A synchronous standby takes over that was cut off between a commit and the mark that settles it: it has everything
// that was acknowledged, and no event is published twice.
func TestASynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		r := w.spawn("relay", "--sweep-workers=1")
		w.waitMode(mode, 20*time.Second)
		first := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		first.Wait()
		w.oracle.Check(t, first, 20*time.Second)
		w.db.Standby(t, "*")
		testenv.Eventually(t, 20*time.Second, func() error {
			var state string
			err := w.db.Pool.QueryRow(t.Context(), "SELECT sync_state FROM pg_stat_replication").Scan(&state)
			if err != nil || state != "sync" {
				return fmt.Errorf("the standby is %q, %w", state, err)
			}
			return nil
		})
		last := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		last.Wait()
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n)
			if err != nil || n < 2*events {
				return fmt.Errorf("the standby has %d rows, %w", n, err)
			}
			return nil
		})
		w.link.To("127.0.0.1:1")
		testenv.Eventually(t, 20*time.Second, func() error {
			if n := len(w.oracle.Entries(t, "order")); n == events {
				return fmt.Errorf("%d entries", n)
			}
			return nil
		})
		testenv.Eventually(t, 20*time.Second, func() error { // a mark is written, and must not be told
			waits := testenv.Value[bool](t, w.db,
				"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')")
			if n := w.settled(); n <= events || !waits {
				return fmt.Errorf("%d events are settled, somebody waits for the standby is %t", n, waits)
			}
			return nil
		})
		r.kill()
		w.promote(other)
		w.spawn("relay")
		w.waitMode(mode, 30*time.Second)
		w.oracle.WaitEmpty(t, 20*time.Second)
		if n := len(w.oracle.Entries(t, "order")); n != 2*events {
			t.Errorf("%d entries, want %d", n, 2*events)
		}
	})
}

// An asynchronous standby takes over, and has the rows but not that they were settled: they are published again, which
// is documented, and that it happened is told.
func TestAnAsynchronousStandbyIsPromoted(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		const events = 60
		w := newReplicated(t, mode)
		if mode == "cdc" { // the standby knows the old timeline; in the other mode the gates alone know better than it
			r := w.spawn("relay")
			w.waitMode(mode, 20*time.Second)
			r.stop()
		}
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: events})
		load.Wait()
		other := w.other()
		testenv.Eventually(t, 20*time.Second, func() error {
			var n int
			if err := other.Pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&n); err != nil ||
				n < events {
				return fmt.Errorf("the standby has %d rows, %w", n, err)
			}
			return nil
		})
		w.link.To("127.0.0.1:1") // it hears no more
		r := w.spawn("relay")
		w.waitMode(mode, 20*time.Second)
		w.oracle.Check(t, load, 20*time.Second)
		r.stop()
		w.promote(other)
		r = w.spawn("relay")
		w.waitMode(mode, 20*time.Second)
		w.oracle.Check(t, load, 20*time.Second)
		if n := len(w.oracle.Entries(t, "order")); n != 2*events {
			t.Errorf("%d entries, want %d: not the case", n, 2*events)
		}
		if list := w.losses(); len(list) != 1 || list[0].Stream != "" || list[0].Events != -1 {
			t.Errorf("told: %+v", list)
		}
		present(t, r, "outbox_postgres_failovers_total 1")
		if out := w.once("status").out; !strings.Contains(out, "Postgres has gone back in time") {
			t.Errorf("status: %s", out)
		}
		waitReady(t, r, http.StatusOK, 20*time.Second)
	})
}
