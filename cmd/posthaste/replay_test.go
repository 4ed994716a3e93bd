package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
)

// keep writes n events of 20 aggregates into history, each millisecond one, as if they had been published from an hour
// ago on, and returns their ids in that order.
func (w *world) keep(n int, stream string) []string {
	w.t.Helper()
	rows, err := w.db.Pool.Query(w.t.Context(), `
		WITH h AS (
			INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at, `+
		`published_at, stream, mode)
			SELECT g, gen_random_uuid(), 'order', 'o-' || g % 20, 'order.changed', jsonb_build_object('n', g), now(),
				now() - interval '1 hour' + g * interval '1 millisecond', $2, 'cdc'
			FROM generate_series(1, $1::int) g
			RETURNING seq, id::text
		) SELECT id FROM h ORDER BY seq`, n, stream)
	if err != nil {
		w.t.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return ids
}

// wantStream compares a stream with ids, each once and in order, and all marked.
func (w *world) wantStream(stream string, ids []string) {
	w.t.Helper()
	entries := rawEntries(w.t, w, stream)
	for i, e := range entries {
		if e["replayed"] != "1" {
			w.t.Fatalf("entry %d of %s is not marked: %v", i, stream, e)
		}
		if i < len(ids) && e["id"] != ids[i] {
			w.t.Fatalf("entry %d of %s is %s, want %s (%d entries, want %d)", i, stream, e["id"], ids[i], len(entries),
				len(ids))
		}
	}
	if len(entries) != len(ids) {
		w.t.Fatalf("%d entries in %s, want %d", len(entries), stream, len(ids))
	}
}

// replayed is what replay --json prints.
type replayed struct {
	Finished, Resumed bool
	Replayed          int64
	Count             int64 `json:"replayed_in_all"`
	Total             int64
	Since, Until      time.Time
}

func (w *world) replay(args ...string) (replayed, result) {
	w.t.Helper()
	r := w.once(append([]string{"replay", "--json", "--rate=0"}, args...)...)
	var v replayed
	if err := json.Unmarshal([]byte(r.out), &v); err != nil {
		w.t.Fatalf("replay %v: exit %d, %v: %s%s", args, r.code, err, r.out, r.errOut)
	}
	return v, r
}

// A replayed entry is the entry it repeats, and a mark. That holds whichever way the event went.
func TestReplayedEntriesAreTheSame(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"poll", "cdc"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn(mode)
			for i := range 30 {
				w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
					VALUES (gen_random_uuid(), $1, $2, 'x.changed', jsonb_build_object('b', $3::int, 'a', 'é"\'), `+
					`$4::text::jsonb)`,
					[]string{"order", "invoice"}[i%2], fmt.Sprintf("o %d", i%3), i,
					[]string{`{"traceparent":"00-1"}`, "null", `{"x":1}`}[i%3])
			}
			w.oracle.WaitEmpty(t, 20*time.Second)
			if code := r.stop(); code != 0 {
				t.Fatalf("exit %d", code)
			}
			first := map[string][]map[string]string{}
			for _, s := range []string{"outbox.order", "outbox.invoice"} {
				first[s] = rawEntries(t, w, s)
			}
			heard := w.redis.Client.PSubscribe(t.Context(), "*")
			t.Cleanup(func() { _ = heard.Close() })
			if _, err := heard.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}

			if dry := w.once("replay", "--all", "--dry-run"); dry.code != 0 ||
				!strings.Contains(dry.out, "30 events would be replayed; nothing was done") ||
				!strings.Contains(dry.out, "outbox.invoice  15") {
				t.Errorf("dry run: exit %d: %s%s", dry.code, dry.out, dry.errOut)
			}
			v, _ := w.replay("--all")
			if !v.Finished || v.Resumed || v.Replayed != 30 || v.Total != 30 {
				t.Errorf("replay: %+v", v)
			}
			for s, entries := range first {
				all := rawEntries(t, w, s)
				if len(all) != 2*len(entries) {
					t.Fatalf("%d entries in %s, want %d", len(all), s, 2*len(entries))
				}
				// Two sweepers may have published two aggregates beside each other: the order is that within each.
				again := all[len(entries):]
				for _, list := range [][]map[string]string{entries, again} {
					slices.SortStableFunc(list, func(a, b map[string]string) int {
						return strings.Compare(a["subject"],
							b["subject"])
					})
				}
				for i, e := range again {
					if e["replayed"] != "1" {
						t.Errorf("entry %v is not marked", e)
					}
					delete(e, "replayed")
					if !maps.Equal(e, entries[i]) {
						t.Errorf("entry %v is replayed as %v", entries[i], e)
					}
				}
			}

			// Once more is nothing more, unless that is said.
			if v, r := w.replay("--all"); !v.Finished || v.Replayed != 0 || v.Count != 30 || r.code != 0 {
				t.Errorf("the same command again: %+v", v)
			}
			if r := w.once("replay", "--all"); !strings.Contains(r.out, "--restart") {
				t.Errorf("the same command again says %q", r.out)
			}
			if v, _ := w.replay("--all", "--restart"); v.Replayed != 30 || v.Resumed {
				t.Errorf("begun again: %+v", v)
			}
			if n := len(rawEntries(t, w, "outbox.order")); n != 45 {
				t.Errorf("%d entries, want 45", n)
			}
			if msg, err := heard.ReceiveTimeout(t.Context(), 50*time.Millisecond); err == nil {
				t.Errorf("a replay is published on Pub/Sub: %v", msg)
			}
		})
	}
}

func TestReplaySelects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(100, "outbox.order")
	more := w.keep(10, "outbox.invoice")
	from := testenv.Value[time.Time](t, w.db, "SELECT published_at FROM outbox_history WHERE id = $1", ids[20])
	to := testenv.Value[time.Time](t, w.db, "SELECT published_at FROM outbox_history WHERE id = $1", ids[29])
	w.db.Exec(t, "UPDATE outbox_history SET event_type = 'order.paid' WHERE seq % 10 = 0 AND stream = 'outbox.order'")
	every := func(step, first int) (list []string) {
		for i := first; i < len(ids); i += step {
			list = append(list, ids[i])
		}
		return list
	}
	at := func(t time.Time) string { return t.Format(time.RFC3339Nano) }
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"id":      {[]string{"--id=" + ids[41]}, ids[41:42]},
		"subject": {[]string{"--subject=o-3", "--stream=outbox.order"}, every(20, 2)},
		"time":    {[]string{"--since=" + at(from), "--until=" + at(to), "--stream=outbox.order"}, ids[20:30]},
		"ago":     {[]string{"--since=2h", "--until=1m", "--stream=outbox.invoice"}, more},
		"type":    {[]string{"--all", "--type=order.paid"}, every(10, 9)},
		"nothing": {[]string{"--since=1m"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			side := "again." + name
			v, r := w.replay(append(c.args, "--to="+side)...)
			if r.code != 0 || v.Replayed != int64(len(c.want)) {
				t.Errorf("exit %d, %+v: %s", r.code, v, r.errOut)
			}
			w.wantStream(side, c.want)
		})
	}
	if n := w.redis.Client.Exists(t.Context(), "outbox.order", "outbox.invoice").Val(); n != 0 {
		t.Error("a replay into a side stream touched a live one")
	}
	w.once("replay", "--id=00000000-0000-4000-8000-000000000000").oneLine(t, 1, "is not in history")
}

func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.once("replay", "--all").oneLine(t, 1, "history is empty")
	w.once("replay", "--all", "--history=0").oneLine(t, 1, "history is off (POSTHASTE_HISTORY=0)")
	w.keep(10, "outbox.order")
	w.db.Exec(t, "INSERT INTO outbox_stream VALUES ('outbox.order', 1)")
	ctx, client := t.Context(), w.redis.Client
	client.Set(ctx, "text", "x", 0)
	client.HSet(ctx, "{elsewhere}:gate", "source", "00000000-0000-4000-8000-000000000001", "owner", "1|00")
	client.HSet(ctx, "{outbox.order}:gate", "source", "00000000-0000-4000-8000-000000000001", "owner", "1|00")
	for _, c := range []struct {
		code int
		text string
		args []string
	}{
		{2, "--all for everything", nil},
		{2, "--all selects everything", []string{"--all", "--since=1h"}},
		{2, "--since", []string{"--since=yesterday"}},
		{2, "--since", []string{"--since=-1h"}},
		{2, "--id", []string{"--id=7"}},
		{2, "--rate", []string{"--all", "--rate=quick"}},
		{2, "is before --since", []string{"--since=1h", "--until=2h"}},
		{2, "letters, digits", []string{"--all", "--to={outbox.order}:gate"}},
		{2, "posthaste's own", []string{"--all", "--to=dead.outbox.order"}},
		{2, "posthaste's own", []string{"--all", "--to=outbox.order:gate"}},
		{1, "the relay publishes to it", []string{"--all", "--to=outbox.order"}},
		{1, "holds a string", []string{"--all", "--to=text"}},
		{1, "a relay publishes to it", []string{"--all", "--to=elsewhere"}},
		{1, "another database", []string{"--all"}},
	} {
		r := w.once(append([]string{"replay"}, c.args...)...)
		last := r.errOut[strings.LastIndex(strings.TrimSpace(r.errOut), "\n")+1:]
		if r.code != c.code || !strings.HasPrefix(last, "posthaste: ") || !strings.Contains(last, c.text) {
			t.Errorf("replay %v: exit %d: %s; want exit %d and %q", c.args, r.code, r.errOut, c.code, c.text)
		}
	}
	if n := client.Exists(ctx, "outbox.order", "elsewhere").Val(); n != 0 {
		t.Error("something was published")
	}
	w.rdURL = "redis://127.0.0.1:1"
	w.once("replay", "--all").oneLine(t, 1, "refused")
	w.pgURL = "postgres://127.0.0.1:1/none"
	w.once("replay", "--all").oneLine(t, 1, "refused")
}

// waitLen waits until a stream has at least n entries.
func (w *world) waitLen(stream string, n int64) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		if have, err := w.redis.Client.XLen(w.t.Context(), stream).Result(); err != nil || have < n {
			return fmt.Errorf("%d entries (%w), want %d", have, err, n)
		}
		return nil
	})
}

// Killed at any point and run again, a replay goes on exactly where it stopped.
func TestReplayKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const events, kills = 12000, 6
	ids := w.keep(events, "outbox.order")
	for i := range kills {
		p := w.start("replay", "--all", "--rate=3000")
		w.waitLen("outbox.order", int64((i+1)*500))
		_ = p.cmd.Process.Kill()
		<-p.done
		// What is published after the beginning is not part of it.
		w.db.Exec(t, `INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, `+
			`created_at, published_at, stream, mode)
			VALUES ($1, gen_random_uuid(), 'order', 'o', 'x', '{}', now(), clock_timestamp(), 'outbox.order', 'cdc')`,
			events+i+1)
	}
	v, r := w.replay("--all")
	if !v.Finished || !v.Resumed || v.Count != events || v.Replayed == 0 || v.Replayed >= events {
		t.Errorf("the last run: %+v", v)
	}
	if !strings.Contains(r.errOut, "continuing the replay begun at") || !strings.Contains(r.errOut, "--restart") {
		t.Errorf("it does not say that it goes on: %s", r.errOut)
	}
	w.wantStream("outbox.order", ids)
}

// Ctrl-C stops a replay in order and says how to go on.
func TestReplayInterrupted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(10000, "outbox.order")
	p := w.start("replay", "--all", "--rate=1000/s")
	w.waitLen("outbox.order", 250)
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if code := p.cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit %d", code)
	}
	p.waitText(t, "the same command continues from there")
	p.waitText(t, "of 10,000 events are published")
	if v, _ := w.replay("--all"); !v.Finished || !v.Resumed || v.Count != 10000 {
		t.Errorf("the second run: %+v", v)
	}
	w.wantStream("outbox.order", ids)
}

// A replay that Redis has forgotten does not promise to go on.
func TestReplayForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.keep(10000, "outbox.order")
	p := w.start("replay", "--all", "--rate=1000")
	w.waitLen("outbox.order", 250)
	if err := w.redis.Client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if out := p.text(); p.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(out, "redis has forgotten") ||
		!strings.Contains(out, "starts over if that is nothing") {
		t.Errorf("exit %d: %s", p.cmd.ProcessState.ExitCode(), out)
	}
}

// Two at once: the second takes over, and between them each event is published once.
func TestReplayTwiceAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(10000, "outbox.order")
	first := w.start("replay", "--all", "--rate=1000")
	w.waitLen("outbox.order", 250)
	if v, _ := w.replay("--all"); !v.Finished || !v.Resumed {
		t.Errorf("the second: %+v", v)
	}
	<-first.done
	if out := first.text(); first.cmd.ProcessState.ExitCode() != 1 ||
		!strings.Contains(out, "another process has taken this replay over") {
		t.Errorf("the first: exit %d: %s", first.cmd.ProcessState.ExitCode(), out)
	}
	w.wantStream("outbox.order", ids)
}

// Redis full, read-only, cut off and restarted: the replay waits, says so, and loses and doubles nothing.
func TestReplayThroughTrouble(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "appendonly yes", "appendfsync always")
	proxy := testenv.NewProxy(t, w.redis.Addr())
	w.rdURL = "redis://" + proxy.Addr()
	const events = 30000
	ids := w.keep(events, "outbox.order")
	ctx, client := t.Context(), w.redis.Client
	p := w.start("replay", "--all", "--rate=2000")
	set := func(args ...any) {
		t.Helper()
		if err := client.Do(ctx, append([]any{"config", "set"}, args...)...).Err(); err != nil {
			t.Fatal(err)
		}
	}
	goesOn := 0
	trouble := func(words string, begin, end func()) {
		t.Helper()
		before := client.XLen(ctx, "outbox.order").Val()
		begin()
		testenv.Eventually(t, 20*time.Second, func() error {
			if out := p.text(); strings.Count(out, "; waiting\n") <= goesOn || !strings.Contains(out, words) {
				return fmt.Errorf("it does not say once more that it waits, with %q: %s", words, out)
			}
			return nil
		})
		end()
		goesOn++
		testenv.Eventually(t, 30*time.Second, func() error {
			if n := strings.Count(p.text(), "going on\n"); n < goesOn {
				return fmt.Errorf("it goes on %d times, want %d: %s", n, goesOn, p.text())
			}
			return nil
		})
		w.waitLen("outbox.order", before+1)
	}
	w.waitLen("outbox.order", 500)
	trouble("raise maxmemory", func() { set("maxmemory", "1") }, func() { set("maxmemory", "0") })
	trouble("READONLY", func() { client.Do(ctx, "replicaof", "127.0.0.1", "1") },
		func() { client.Do(ctx, "replicaof", "no", "one") })
	for i := range 3 {
		trouble("", func() {
			proxy.Toxic(fmt.Sprintf(
				`{"name":"lost","type":"limit_data","stream":"downstream","attributes":{"bytes":%d}}`, 1+i*4))
		}, func() { proxy.Remove("lost") })
	}
	// Only the first error is said: that of a call that was under way, or a refused connection.
	trouble("", proxy.Down, func() {
		if err := w.redis.Kill(); err != nil {
			t.Error(err)
		}
		if err := w.redis.Start(ctx); err != nil {
			t.Error(err)
		}
		proxy.Up()
	})
	w.db.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE "+
		"'posthaste%replay%' AND datname = current_database()")
	w.waitLen("outbox.order", client.XLen(ctx, "outbox.order").Val()+1000)
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-p.done
	if v, _ := w.replay("--all"); !v.Finished || v.Count != events {
		t.Errorf("the rest: %+v", v)
	}
	w.wantStream("outbox.order", ids)
}

// A replay into the live streams while the relay works and changes its mode: the live events are neither lost nor
// doubled nor reordered, and each replayed one comes once.
func TestReplayBesideALiveRelay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.spawn("relay", "--log-level=info")
	w.waitMode("cdc", 20*time.Second)
	types := []string{"order", "invoice"}
	old := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 3000, Types: types})
	old.Wait()
	w.oracle.Check(t, old, 20*time.Second)
	before := w.oracle.Entries(t, types...)
	epoch := w.redis.Client.HGet(t.Context(), "{outbox.order}:gate", "source").Val()

	live := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 800, Types: types})
	until := testenv.Value[time.Time](t, w.db,
		"SELECT max(published_at) FROM outbox_history WHERE id = ANY($1::uuid[])", idsOf(before))
	p := w.start("replay", "--all", "--until="+until.Format(time.RFC3339Nano), "--rate=1500")
	for i := range 4 {
		if i%2 == 0 {
			r.setMode("poll")
			w.waitMode("poll", 20*time.Second)
		} else {
			r.setMode("auto")
			w.waitMode("cdc", 20*time.Second)
		}
	}
	<-p.done
	live.Stop()
	oracle := w.oracle
	oracle.Others = []*testenv.Load{old}
	oracle.Check(t, live, 20*time.Second)
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Fatalf("exit %d: %s", code, p.text())
	}
	if now := w.redis.Client.HGet(t.Context(), "{outbox.order}:gate", "source").Val(); now != epoch {
		t.Error("the gate is another database's")
	}
	// What was there comes once more, of the same aggregate in the same order. (Oldest rows of history may be the live
	// load's: it began before the replay's upper bound was read.)
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

func idsOf(entries []testenv.Entry) []string {
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
	}
	return ids
}

// bySubject orders lines "subject id" by their subjects alone.
func bySubject(a, b string) int {
	a, _, _ = strings.Cut(a, " ")
	b, _, _ = strings.Cut(b, " ")
	return strings.Compare(a, b)
}

// An event whose transaction is slow to commit is published before others that are visible already. The replay waits
// for it.
func TestReplayWaitsForWhatIsNotVisibleYet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(10, "outbox.order")
	tx, err := w.db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }() // the pool's end would wait for it
	var late string
	err = tx.QueryRow(t.Context(),
		`INSERT INTO outbox_history (seq, id, aggregate_type, aggregate_id, event_type, payload, created_at, `+
			`published_at, stream, mode)
		VALUES (11, gen_random_uuid(), 'order', 'o', 'x', '{}', now(), clock_timestamp(), 'outbox.order', 'cdc') `+
			`RETURNING id::text`).Scan(&late)
	if err != nil {
		t.Fatal(err)
	}
	p := w.start("replay", "--all", "--rate=0")
	p.waitText(t, "waiting for 1 transactions that write history")
	if n := w.redis.Client.Exists(t.Context(), "outbox.order").Val(); n != 0 {
		t.Error("it does not wait")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-p.done
	w.wantStream("outbox.order", append(ids, late))
}

// Partitions that are dropped before the replay has reached them are missed, and said so.
func TestReplaySaysWhatLeftHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.keep(10000, "outbox.order")
	p := w.start("replay", "--all", "--rate=2000")
	w.waitLen("outbox.order", 250)
	w.db.Exec(t, "DELETE FROM outbox_history WHERE seq > 9900")
	<-p.done
	if code := p.cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(p.text(),
		"100 of 10,000 events left history before they were replayed") {
		t.Errorf("exit %d: %s", code, p.text())
	}
}
