package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
)

// keep writes n events of 20 aggregates to the log, as if they had been published to a stream an hour ago. It returns
// their ids in the order of a replay. If n is at most 100, each event has its own mark, a millisecond apart.
func (w *world) keep(n int, stream string) []string {
	w.t.Helper()
	each := 1000
	if n <= 100 {
		each = 1
	}
	return w.history(n, each, strings.TrimPrefix(stream, "outbox."), "o-", time.Hour)
}

// keepInLog is keep for different aggregates of orders, half an hour ago.
func (w *world) keepInLog(n int) []string {
	w.t.Helper()
	return w.history(n, 1000, "order", "l-", 30*time.Minute)
}

// history inserts n events with a mark for every each events. They are as old as ago, but later than all other marks.
func (w *world) history(n, each int, typ, aggregates string, ago time.Duration) (ids []string) {
	w.t.Helper()
	begun := testenv.Value[time.Time](w.t, w.db, `
		SELECT greatest(now() - $1::interval, (SELECT max(at) + interval '1 s' FROM outbox_mark WHERE epoch > 0))`, ago)
	for from := 0; from < n; from += each {
		ids = append(ids, testenv.Value[[]string](w.t, w.db, `
			WITH h AS (
				INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
				SELECT $1, $2 || g % 20, 'order.changed', jsonb_build_object('n', g)
				FROM generate_series($3::int + 1, $4::int) g
				RETURNING outbox_part(aggregate_id) AS part, seq, id::text
			) SELECT array_agg(id ORDER BY part, seq) FROM h`, typ, aggregates, from, min(from+each, n))...)
		w.db.Exec(w.t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at, mode)
			SELECT -1, 1, pg_current_snapshot(), high, $1, 'cdc' FROM outbox_high`,
			begun.Add(time.Duration(from/each)*time.Millisecond))
	}
	return ids
}

// wantStream checks that a stream has exactly ids, each once and in order, all marked as replayed.
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

// replayed is the output of replay --json.
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

// A replayed entry equals the original entry plus a mark, in both modes. The only exception is the time of an entry
// that was streamed.
func TestReplayedEntriesAreTheSame(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		for i := range 30 {
			w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
					VALUES (gen_random_uuid(), $1, $2, 'x.changed', jsonb_build_object('b', $3::int, 'a', 'é"\'), `+
				`$4::text::jsonb)`,
				[]string{"order", "invoice"}[i%2], fmt.Sprintf("o %d", i%3), i,
				[]string{`{"traceparent":"00-1","y":"z"}`, "null", `{"x":1}`}[i%3])
		}
		w.oracle.WaitEmpty(t, 20*time.Second)
		r.stops()
		first := map[string][]map[string]string{}
		for _, s := range []string{"outbox.order", "outbox.invoice"} {
			first[s] = rawEntries(t, w, s)
		}
		heard := w.redis.Client.PSubscribe(t.Context(), "*")
		t.Cleanup(func() { _ = heard.Close() })
		_, err := heard.Receive(t.Context())
		must(t, err)

		w.once("replay", "--all", "--dry-run").says(t, 0,
			"30 events would be replayed; nothing was done", "outbox.invoice  15")
		v, _ := w.replay("--all")
		if !v.Finished || v.Resumed || v.Replayed != 30 || v.Total != 30 {
			t.Errorf("replay: %+v", v)
		}
		for s, entries := range first {
			all := rawEntries(t, w, s)
			if len(all) != 2*len(entries) {
				t.Fatalf("%d entries in %s, want %d", len(all), s, 2*len(entries))
			}
			// Two sweepers may have published two aggregates concurrently, so only the order within each is
			// compared.
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
				if mode == "cdc" && e["time"] <= entries[i]["time"] {
					e["time"] = entries[i]["time"] // the log has the time of the insert
				}
				if !maps.Equal(e, entries[i]) {
					t.Errorf("entry %v is replayed as %v", entries[i], e)
				}
			}
		}

		// Without --restart, another run publishes nothing.
		if v, r := w.replay("--all"); !v.Finished || v.Replayed != 0 || v.Count != 30 || r.code != 0 {
			t.Errorf("the same command again: %+v", v)
		}
		w.once("replay", "--all").says(t, 0, ": posthaste replay --all --restart")
		if v, _ := w.replay("--all", "--restart"); v.Replayed != 30 || v.Resumed {
			t.Errorf("begun again: %+v", v)
		}
		w.hasLen("outbox.order", 45)
		if msg, err := heard.ReceiveTimeout(t.Context(), 50*time.Millisecond); err == nil {
			t.Errorf("a replay is published on Pub/Sub: %v", msg)
		}
	})
}

func TestReplaySelects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(100, "outbox.order")
	more := w.keep(10, "outbox.invoice")
	settled := w.keepInLog(2000)
	from := testenv.Value[time.Time](t, w.db, "SELECT published_at FROM outbox_history WHERE id = $1", ids[20])
	to := testenv.Value[time.Time](t, w.db, "SELECT published_at FROM outbox_history WHERE id = $1", ids[29])
	w.db.Exec(t, "UPDATE outbox SET event_type = 'order.paid' WHERE seq % 10 = 0 AND seq <= 100")
	every := func(step, first int) (list []string) {
		for i := first; i < len(ids); i += step {
			list = append(list, ids[i])
		}
		return list
	}
	ofLog := func(subject string) []string {
		return testenv.Value[[]string](t, w.db,
			"SELECT array_agg(id::text ORDER BY seq) FROM outbox WHERE aggregate_id = $1", subject)
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
		// The same selections on the log.
		"log id":      {[]string{"--id=" + settled[41]}, settled[41:42]},
		"log subject": {[]string{"--subject=l-3"}, ofLog("l-3")},
		"log time":    {[]string{"--since=35m", "--stream=outbox.order"}, settled},
	} {
		t.Run(name, func(t *testing.T) {
			side := "again." + strings.ReplaceAll(name, " ", ".")
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

// Package replay tests options that contradict each other.
func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.once("replay", "--all").oneLine(t, 1, "history is empty")
	w.once("replay", "--all", "--history=0").oneLine(t, 1, "history is off (POSTHASTE_HISTORY=0)")
	w.keep(10, "outbox.order")
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 1)")
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, adopted_epoch, base) VALUES ('outbox.user.1', 1, 'outbox.user')")
	ctx, client := t.Context(), w.redis.Client
	client.Set(ctx, "text", "x", 0)
	for _, stream := range []string{"elsewhere", "outbox.order"} {
		client.HSet(ctx, registerOf(stream), "id", "1", "s:/posthaste/other", "00000000-0000-4000-8000-000000000001")
	}
	for _, c := range []struct {
		code int
		text string
		args []string
	}{
		{2, "is before --since", []string{"--since=1h", "--until=2h"}},
		{1, "the relay publishes to it", []string{"--all", "--to=outbox.order"}},
		{1, "the relay publishes to it", []string{"--all", "--to=outbox.user"}}, // the type's stream outbox.user.1
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
	w.once("replay", "--all").oneLine(t, 1, "refuses")
	w.pgURL = "postgres://127.0.0.1:1/none"
	w.once("replay", "--all").oneLine(t, 1, "refuses")
}

// An event's headers reach its stream on every way: as it is committed, from the table, after a retry of the dead
// event, and when Redis has lost it.
func TestHeadersOnEveryWay(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t, "proto-max-bulk-len 1mb")
		var ids []string
		insert := func(payload string) {
			id := uuid.NewString()
			w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
				VALUES ($1::text::uuid, 'order', 'a', 'made', to_jsonb($2::text),
					jsonb_build_object('tenant', $1::text))`,
				id, payload)
			ids = append(ids, id)
		}
		complete := func() {
			t.Helper()
			testenv.Eventually(t, 60*time.Second, func() error {
				entries := w.redis.Client.XRange(t.Context(), "outbox.order", "-", "+").Val()
				if len(entries) != len(ids) {
					return fmt.Errorf("%d entries, want %d", len(entries), len(ids))
				}
				for _, e := range entries {
					if e.Values["headers"] != fmt.Sprintf(`{"tenant": "%v"}`, e.Values["id"]) {
						return fmt.Errorf("the headers of %v are %v", e.Values["id"], e.Values["headers"])
					}
				}
				return nil
			})
		}
		insert("waits in the table")
		w.relayIn(mode, "--stream-maxlen=0")
		insert("is committed")
		complete()
		insert(strings.Repeat("x", 1<<20+1))
		w.dead(1)
		do(t, w.redis.Client, "config", "set", "proto-max-bulk-len", "512mb")
		w.once("dead", "retry", ids[2]).says(t, 0)
		complete()
		w.waitMode(mode)
		do(t, w.redis.Client, "flushall")
		complete()
	})
}
