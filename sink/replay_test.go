package sink_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/sink"
)

// replay returns a replay of the fixture's database under a name.
func (f *fixture) replay(name string, c redis.UniversalClient, side bool) *sink.Replay {
	return sink.NewReplay(sink.ReplayOptions{
		Client: c, Name: name, Source: "/posthaste/test", Database: f.Source,
		Side: side,
	})
}

func (f *fixture) begin(r *sink.Replay, restart bool) *sink.ReplayNote {
	f.Helper()
	n := sink.ReplayNote{Since: time.Unix(1, 0), Until: time.Unix(2, 0), Total: 7, Begun: time.Unix(3, 0)}
	note, err := r.Begin(f.Context(), n, restart, []string{stream})
	f.Must(err)
	return note
}

func (f *fixture) take(r *sink.Replay) string {
	f.Helper()
	c, err := r.Take(f.Context(), stream)
	f.Must(err)
	return c
}

func replayEntries(from, n int) []sink.ReplayEntry {
	list := make([]sink.ReplayEntry, n)
	for i, e := range makeEvents(n) {
		e.Headers = []byte(`{"traceparent":"00-1","tenant":"acme"}`)
		list[i] = sink.ReplayEntry{Place: fmt.Sprintf("%d.1", from+i), Event: e}
	}
	return list
}

// wantReplayed compares the stream with what was replayed, each once and in order.
func (f *fixture) wantReplayed(lists ...[]sink.ReplayEntry) {
	f.Helper()
	var want []string
	for _, l := range lists {
		for _, e := range l {
			want = append(want, e.Event.ID.String())
		}
	}
	var have []string
	msgs, err := f.server.Client.XRange(f.Context(), stream, "-", "+").Result()
	f.Must(err)
	for _, m := range msgs {
		id, _ := m.Values["id"].(string)
		have = append(have, id)
		if m.Values["replayed"] != "1" || m.Values["traceparent"] != "00-1" ||
			m.Values["headers"] != `{"tenant":"acme"}` || len(m.Values) != 10 {
			f.Errorf("entry %v", m.Values)
		}
	}
	if strings.Join(have, " ") != strings.Join(want, " ") {
		f.Fatalf("%d entries, want %d, in order:\n%v\n%v", len(have), len(want), have, want)
	}
}

func TestReplayPublishesOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	f.adopted(3)
	gateBefore := f.server.Client.HGetAll(ctx, f.gate()).Val()
	r := f.replay("a", f.client, false)
	if n, err := r.Find(ctx); err != nil || n != nil {
		t.Fatalf("found %+v, %v before the beginning", n, err)
	}
	begun := f.begin(r, false)
	if c := f.take(r); c != "" {
		t.Errorf("a new replay begins at %q", c)
	}
	one, two := replayEntries(1, 3), replayEntries(4, 2)
	f.Must(r.Publish(ctx, stream, one))
	f.Must(r.Publish(ctx, stream, one)) // repeated: nothing new
	f.Must(r.Publish(ctx, stream, two))
	f.wantReplayed(one, two)
	f.Must(r.Note(ctx, "5.1", 5, time.Time{}))

	// Another process continues, and this one is refused.
	other := f.replay("a", f.client, false)
	if n := f.begin(other, false); n.Run != begun.Run || n.At != "5.1" || n.Count != 5 || n.Total != 7 ||
		!n.Until.Equal(time.Unix(2, 0)) || !n.Done.IsZero() {
		t.Errorf("the note is %+v", n)
	}
	if c := f.take(other); c != "5.1" {
		t.Errorf("the other process goes on behind %q", c)
	}
	three := replayEntries(6, 2)
	wantErr(t, r.Publish(ctx, stream, three), sink.ErrReplayTaken)
	f.Must(other.Publish(ctx, stream, three))
	f.wantReplayed(one, two, three)

	// After a new beginning, the old run can no longer publish or record progress.
	again := f.replay("a", f.client, false)
	if n := f.begin(again, true); n.Run == begun.Run || n.At != "" || n.Count != 0 {
		t.Errorf("the note is %+v after a restart", n)
	}
	wantErr(t, other.Publish(ctx, stream, replayEntries(8, 1)), sink.ErrReplayGone)
	wantErr(t, other.Note(ctx, "9.1", 9, time.Now()), sink.ErrReplayGone)
	if c := f.take(again); c != "" {
		t.Errorf("begun again at %q", c)
	}
	if after := f.server.Client.HGetAll(ctx, f.gate()).Val(); fmt.Sprint(after) != fmt.Sprint(gateBefore) {
		t.Errorf("the gate was %v and is %v", gateBefore, after)
	}
	for _, key := range f.server.Client.Keys(ctx, "*:replay:*").Val() {
		if ttl := f.server.Client.TTL(ctx, key).Val(); ttl < 29*24*time.Hour {
			t.Errorf("%s is kept for %v", key, ttl)
		}
	}
}

// The reply is lost, again and again, in the middle of the calls: each entry is there once.
func TestReplayWithLostReplies(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	p := testenv.NewLink(t, f.server.Addr())
	r := f.replay("a", dial(t, "redis://"+p.Addr()), false)
	f.begin(r, false)
	f.take(r)
	var lists [][]sink.ReplayEntry
	for i := range 5 {
		list := replayEntries(i*10+1, 10)
		lists = append(lists, list)
		p.Set(testenv.Trouble{CutReplies: 3})
		if err := r.Publish(ctx, stream, list); err == nil {
			t.Error("a call without a reply succeeds")
		}
		p.Set(testenv.Trouble{})
		f.Must(r.Publish(ctx, stream, list))
	}
	f.wantReplayed(lists...)
}

// An entry that Redis refuses stops the replay behind the one before it, and names it. What is refused for the state of
// the server, or for a missing right, is published once afterwards.
func TestReplayStopsAtWhatRedisRefuses(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	r := f.replay("a", f.client, false)
	note := f.begin(r, false)
	f.take(r)
	one, two, three := replayEntries(1, 3), replayEntries(4, 3), replayEntries(7, 3)
	refused := func(list []sink.ReplayEntry, class string) {
		t.Helper()
		for range 2 {
			wantClass(t, r.Publish(ctx, stream, list), class)
		}
	}
	f.Must(r.Publish(ctx, stream, one))
	f.do("CONFIG", "SET", "maxmemory", "1")
	refused(two, "oom")
	// A restart that finds no memory leaves the note as it was.
	if _, err := f.replay("a", f.client, false).Begin(ctx, *note, true, nil); sink.Class(err) != "oom" {
		t.Errorf("restart without memory: %v", err)
	}
	f.do("CONFIG", "SET", "maxmemory", "0")
	if n, err := r.Find(ctx); err != nil || n.Run != note.Run {
		t.Errorf("the note is %+v, %v", n, err)
	}
	f.do("ACL", "SETUSER", "default", "-xadd")
	refused(two, "noperm")
	f.do("ACL", "SETUSER", "default", "+xadd")
	f.Must(r.Publish(ctx, stream, two))
	f.wantReplayed(one, two)
	// The stream's last possible id: the next XADD fails.
	f.do("XSETID", stream, "18446744073709551615-18446744073709551614")
	wantClass(t, r.Publish(ctx, stream, three), "exhausted")
	f.wantReplayed(one, two, three[:1])
}

func TestReplayLooksWhereItGoes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	refused := func(r *sink.Replay, name, words string) {
		t.Helper()
		_, err := r.Take(ctx, name)
		var e *sink.ReplayError
		if !errors.As(err, &e) || !strings.Contains(err.Error(), words) {
			t.Errorf("into %s: %v, want a refusal with %q", name, err, words)
		}
	}
	f.adopted(1)
	side := f.replay("side", f.client, true)
	f.begin(side, false)
	refused(side, stream, "a relay publishes to it")
	f.do("SET", "text", "x")
	refused(side, "text", "holds a string")
	if _, err := side.Take(ctx, "again.order"); err != nil {
		t.Error(err)
	}
	f.Source = uuid.New()
	foreign := f.replay("foreign", f.client, false)
	f.begin(foreign, false)
	refused(foreign, stream, "another database")
}

// Redis comes back without the last entries and the notes of them, as after a failover.
func TestReplayAfterLostEntries(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ctx := t.Context()
	r := f.replay("a", f.client, false)
	run := f.begin(r, false).Run
	f.take(r)
	one, two := replayEntries(1, 2), replayEntries(3, 2)
	f.Must(r.Publish(ctx, stream, one))
	record := "{" + stream + "}:replay:" + run
	dump := f.server.Client.Dump(ctx, record).Val()
	dumped := f.server.Client.Dump(ctx, stream).Val()
	f.Must(r.Publish(ctx, stream, two))
	f.Must(f.server.Client.RestoreReplace(ctx, record, 0, dump).Err())
	f.Must(f.server.Client.RestoreReplace(ctx, stream, 0, dumped).Err())
	three := replayEntries(5, 1)
	wantErr(t, r.Publish(ctx, stream, three), sink.ErrReplayMoved)
	f.Must(f.server.Client.Del(ctx, record).Err())
	wantErr(t, r.Publish(ctx, stream, three), sink.ErrReplayGone)
	f.wantReplayed(one)
}
