package main

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
)

// waitLen waits until a stream has at least n entries.
func (w *world) waitLen(stream string, n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, time.Minute, func() error {
		have, err := w.oracle.Redis.XLen(w.t.Context(), stream).Result()
		return testenv.FailIf(err != nil || have < n, "%d entries in %s (%w), want %d", have, stream, err, n)
	})
}

// A replay is killed at any point and started again. It continues exactly where it stopped.
func TestReplayKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const events, kills = 12000, 6
	ids := slices.Concat(w.keep(events/2, "outbox.order"), w.keepInLog(events/2))
	for i := range kills {
		p := w.start("replay", "--all", "--rate=3000")
		w.waitLen("outbox.order", int64((i+1)*500))
		p.kill()

		// Events published after the start of the replay are not part of it.
		w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', 'late', 'x', '{}')`)
		w.db.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi)
			SELECT -1, 1, pg_current_snapshot(), last_value FROM outbox_seq_seq`)
	}
	v, r := w.replay("--all")
	if !v.Finished || !v.Resumed || v.Count != events || v.Replayed == 0 || v.Replayed >= events {
		t.Errorf("the last run: %+v", v)
	}
	r.warns(t, 0, "continuing the replay begun at", "--restart")
	w.wantStream("outbox.order", ids)
}

// replaying starts a replay of 10,000 events, at a rate at which it is still running afterwards, and returns their ids.
func (w *world) replaying(rate string) (p *child, ids []string) {
	w.t.Helper()
	ids = w.keep(10000, "outbox.order")
	p = w.start("replay", "--all", "--rate="+rate)
	w.waitLen("outbox.order", 250)
	return p, ids
}

// If Redis has lost the state of a replay, the replay does not offer to continue.
func TestReplayForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, _ := w.replaying("1000")
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	p.ends(1, "redis has lost the progress", "starts over if that is nothing")
}

// Two replays run concurrently: the second takes over, and together they publish each event once.
func TestReplayTwiceAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first, ids := w.replaying("1000")
	if v, _ := w.replay("--all"); !v.Finished || !v.Resumed {
		t.Errorf("the second: %+v", v)
	}
	first.ends(1, "another process has taken this replay over")
	w.wantStream("outbox.order", ids)
}

// Redis is full, read-only, disconnected and restarted. The replay waits and reports that. It loses and duplicates
// nothing.
func TestReplayThroughTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "appendonly yes", "appendfsync always")
	proxy := testenv.NewLink(t, w.redis.Addr())
	w.rdURL = "redis://" + proxy.Addr()
	const events = 30000
	ids := w.keep(events, "outbox.order")
	ctx, client := t.Context(), w.redis.Client
	p := w.start("replay", "--all", "--rate=2000")
	set := func(name, value string) func() { return func() { do(t, client, "config", "set", name, value) } }
	goesOn := 0
	trouble := func(words string, begin, end func()) {
		t.Helper()
		before := client.XLen(ctx, "outbox.order").Val()
		begin()
		testenv.Eventually(t, 20*time.Second, func() error {
			out := p.output()
			return testenv.FailIf(strings.Count(out, "; waiting\n") <= goesOn || !strings.Contains(out, words),
				"it does not say once more that it waits, with %q: %s", words, out)
		})
		end()
		goesOn++
		testenv.Eventually(t, 30*time.Second, func() error {
			n := strings.Count(p.output(), "going on\n")
			return testenv.FailIf(n < goesOn, "it goes on %d times, want %d: %s", n, goesOn, p.output())
		})
		w.waitLen("outbox.order", before+1)
	}
	w.waitLen("outbox.order", 500)
	trouble("raise maxmemory", set("maxmemory", "1"), set("maxmemory", "0"))
	trouble("READONLY", func() { client.Do(ctx, "replicaof", "127.0.0.1", "1") },
		func() { client.Do(ctx, "replicaof", "no", "one") })
	for i := range 3 {
		trouble("", func() { proxy.Set(testenv.Trouble{CutReplies: 1 + i*4}) }, func() { proxy.Set(testenv.Trouble{}) })
	}
	// Only the first error is logged, either of a running call or of a refused connection.
	trouble("", proxy.Down, func() {
		w.redis.Restart(t)
		proxy.Up()
	})
	w.db.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE "+
		"'posthaste%replay%' AND datname = current_database()")
	w.waitLen("outbox.order", client.XLen(ctx, "outbox.order").Val()+1000)
	p.signal(syscall.SIGINT) // ends it in order, and it says how to continue
	p.ends(1, "the same command continues from there", "of 30,000 events are published")
	if v, _ := w.replay("--all"); !v.Finished || !v.Resumed || v.Count != events {
		t.Errorf("the rest: %+v", v)
	}
	w.wantStream("outbox.order", ids)
}

// A replay publishes to the live streams while the relay works and changes its mode. Live events are neither lost nor
// duplicated nor reordered, and each replayed event comes once.
func TestReplayBesideALiveRelay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc", "--log-level=info")
	types := []string{"order", "invoice"}
	old := w.wrote(testenv.LoadOptions{Total: 3000, Types: types})
	w.oracle.Check(t, old, 20*time.Second)
	before := w.oracle.Entries(t, types...)
	registered := func() string {
		return fmt.Sprint(w.redis.Client.HGetAll(t.Context(), registerOf("outbox.order")).Val())
	}
	register := registered()

	ids := make([]string, len(before))
	for i, e := range before {
		ids[i] = e.ID
	}
	live := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 800, Types: types})
	until := testenv.Value[time.Time](t, w.db,
		"SELECT max(published_at) FROM outbox_history WHERE id = ANY($1::uuid[])", ids)
	p := w.start("replay", "--all", "--until="+until.Format(time.RFC3339Nano), "--rate=1500")
	for i := range 4 {
		w.switches(r, []string{"poll", "auto"}[i%2])
	}
	<-p.done
	live.Stop()
	oracle := w.oracle
	oracle.Others = []*testenv.Load{old}
	oracle.Check(t, live, 20*time.Second)
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Fatalf("exit %d: %s", code, p.output())
	}
	if now := registered(); now != register {
		t.Errorf("the register was %s and is %s", register, now)
	}
	// The earlier entries come once more, those of an aggregate in the same order. (The oldest rows of the history may
	// belong to the live load: it began before the replay's upper bound was read.)
	for _, typ := range types {
		var want, have []string
		for _, e := range before {
			if e.Stream == "outbox."+typ {
				want = append(want, e.Subject+" "+e.ID)
			}
		}
		known := map[string]bool{}
		for _, e := range before {
			known[e.ID] = true
		}
		for _, e := range rawEntries(t, w, "outbox."+typ) {
			if e["replayed"] != "" && known[e["id"]] {
				have = append(have, e["subject"]+" "+e["id"])
			}
		}
		slices.SortStableFunc(want, bySubject)
		slices.SortStableFunc(have, bySubject)
		if !slices.Equal(want, have) {
			t.Errorf("%s: %d replayed, want the %d that were there, in order per aggregate", typ, len(have), len(want))
		}
	}
}

// bySubject orders lines "subject id" by subject only.
func bySubject(a, b string) int {
	a, _, _ = strings.Cut(a, " ")
	b, _, _ = strings.Cut(b, " ")
	return strings.Compare(a, b)
}

// The transaction of an event commits late, so later events become visible and are published first. The replay waits
// for it. If it is interrupted meanwhile, it reports that, and not the error of a library.
func TestReplayWaitsForWhatIsNotVisibleYet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := append(w.keep(10, "outbox.order"), uuid.NewString())
	tx := w.begin(`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'order', 'o', 'x', '{}')`, ids[10])
	_, err := tx.Exec(t.Context(), `INSERT INTO outbox_mark (part, epoch, settled, hi)
		SELECT -1, 1, format('%s:%s:', x, x)::pg_snapshot, high
		FROM outbox_high, (SELECT pg_current_xact_id()::text::bigint + 1 AS x) next`)
	must(t, err)
	waiting := func() *child {
		p := w.start("replay", "--all", "--rate=0")
		p.waitLogged("waiting for 1 transactions that write history")
		w.hasLen("outbox.order", 0)
		return p
	}
	p := waiting()
	p.signal(syscall.SIGINT)
	if p.ends(1); !strings.HasSuffix(p.output(), "\nposthaste: interrupted\n") {
		t.Errorf("it says %q", p.output())
	}
	p = waiting()
	must(t, tx.Commit(t.Context()))
	p.ends(0)
	w.wantStream("outbox.order", ids)
}

// Events that retention deletes before the replay has reached them are not replayed, and the replay reports that.
func TestReplaySaysWhatLeftHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.keep(5000, "outbox.order")
	w.keepInLog(5000)
	p := w.start("replay", "--all", "--rate=2000")
	w.waitLen("outbox.order", 250)
	w.db.Exec(t, "DELETE FROM outbox WHERE seq BETWEEN 4951 AND 5000 OR seq > 9950")
	p.ends(1, "100 of 10,000 events left history before they were replayed")
}
