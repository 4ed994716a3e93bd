package sink_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// servers runs a test on a server that knows when a consumer last tried to read, and on one that does not.
func servers(t *testing.T, test func(t *testing.T, f *fixture, sure bool)) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, ...string) *testenv.RedisServer{
		"redis":  testenv.Redis,
		"valkey": testenv.Valkey,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := on(t, start(t), sink.Options{})
			f.do("XADD", "probe", "1-0", "a", "b")
			f.do("XGROUP", "CREATE", "probe", "g", "0")
			f.do("XGROUP", "CREATECONSUMER", "probe", "g", "c")
			v, err := f.client.Do(t.Context(), "XINFO", "CONSUMERS", "probe", "g").Result()
			f.Must(err)
			test(t, f, strings.Contains(fmt.Sprint(v), "inactive"))
		})
	}
}

// ago makes entries that say they were added d ago.
func (f *fixture) ago(d time.Duration, n int) {
	f.Helper()
	at := time.Now().Add(-d).UnixMilli()
	for i := range n {
		f.do("XADD", stream, fmt.Sprintf("%d-%d", at, i), "a", "b")
	}
}

func (f *fixture) groups(streams ...string) map[string]sink.Group {
	f.Helper()
	list, err := sink.Groups(f.Context(), f.client, streams)
	f.Must(err)
	m := map[string]sink.Group{}
	for _, g := range list {
		m[g.Name] = g
	}
	return m
}

func about(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if got < want || got > want+30*time.Second {
		t.Errorf("%s is %v, want about %v", what, got, want)
	}
}

func TestGroups(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		f.ago(2*time.Hour, 6)
		f.ago(time.Minute, 4)
		f.group("never", "0")
		f.group("latest", "$")
		f.group("reading", "0")
		f.group("done", "0")
		f.read("reading", 8)
		f.ack("done", f.read("done", 10)...)
		g := f.groups(stream, "outbox.missing")
		if len(g) != 4 {
			t.Fatalf("%d groups, want 4", len(g))
		}
		never := g["never"]
		if never.Lag != 10 || never.Pending != 0 || never.Consumers != 0 || never.Seen != -1 || !never.Abandoned() ||
			never.Floor != "0-0" {
			t.Errorf("a group nobody reads: %+v", never)
		}
		about(t, "its idle time", never.Idle, 2*time.Hour)
		if r := g["reading"]; r.Lag != 2 || r.Pending != 8 || r.Consumers != 1 || r.Abandoned() ||
			r.Idle > time.Minute ||
			r.Seen < 0 || r.Lost != 0 {
			t.Errorf("a group that is behind, and read: %+v", r)
		}
		about(t, "how long it keeps an entry waiting", g["reading"].Waits, 2*time.Hour)
		about(t, "its oldest pending entry's age", g["reading"].OldestPending, 2*time.Hour)
		for _, name := range []string{"latest", "done"} {
			if d := g[name]; d.Lag != 0 || d.Pending != 0 || d.Idle != 0 || d.Waits != 0 || d.Abandoned() || d.Owes() {
				t.Errorf("a group for which nothing waits: %+v", d)
			}
		}
		f.Must(f.sink.Observe(t.Context(), []string{stream}))
		if v := f.metric("outbox_group_idle_seconds", "group", "never"); v < 7200 || v > 7230 {
			t.Errorf("outbox_group_idle_seconds is %v, want about 7200", v)
		}
		f.wantMetric("outbox_group_idle_seconds", 0, "group", "done")
	})
}

func TestGroupsCountWhatWasTrimmed(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		f.ago(time.Minute, 10)
		f.do("XGROUP", "CREATE", stream, "g", "0", "ENTRIESREAD", "0")
		f.read("g", 4)
		f.do("XTRIM", stream, "MAXLEN", "3")
		if g := f.groups(stream)["g"]; g.Lag != 3 || g.Lost != 3 {
			t.Errorf("lag %d and %d lost, want 3 and 3", g.Lag, g.Lost)
		}
		f.do("DEL", stream)
		f.ago(time.Minute, 5)
		f.do("XGROUP", "CREATE", stream, "g", "0")
		f.read("g", 1)
		f.do("XDEL", stream, f.read("g", 2)[1])
		g := f.groups(stream)["g"]
		if g.Lag != -1 && g.Lag != 2 {
			t.Errorf("lag %d after a deletion, want 2 or -1", g.Lag)
		}
		if !g.Owes() {
			t.Error("unknown is taken for nothing")
		}
	})
}

func TestGroupsOfWhatIsNoStream(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{}, 3)
	f.group("g", "0")
	f.do("SET", "text", "x")
	list, err := sink.Groups(t.Context(), f.client, []string{"text", stream})
	if err == nil || !strings.Contains(err.Error(), `"text"`) {
		t.Errorf("error %v does not name the key", err)
	}
	if len(list) != 1 || list[0].Lag != 3 {
		t.Errorf("the other stream's groups are %+v", list)
	}
	b, err := json.Marshal(list[0])
	f.Must(err)
	var v map[string]any
	f.Must(json.Unmarshal(b, &v))
	if v["group"] != "g" || v["lag"] != 3.0 || v["seen_seconds"] != nil || v["abandoned"] != true {
		t.Errorf("as JSON: %s", b)
	}
}

func TestDropGroup(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, sure bool) {
		ctx := t.Context()
		f.ago(time.Hour, 3)
		drop := func(group string, active time.Duration, force bool) error {
			return sink.DropGroup(ctx, f.client, stream, group, active, force)
		}
		refused := func(err error, words string) {
			t.Helper()
			var active *sink.ActiveError
			if !errors.As(err, &active) || !strings.Contains(err.Error(), words) {
				t.Errorf("error %v, want one with %q", err, words)
			}
		}
		f.group("abandoned", "0")
		f.Must(drop("abandoned", sink.ActiveWithin, false))
		wantErr(t, drop("abandoned", sink.ActiveWithin, false), sink.ErrNoGroup)
		wantErr(t, sink.DropGroup(ctx, f.client, "outbox.missing", "g", 0, true), sink.ErrNoGroup)

		f.group("busy", "0")
		f.read("busy", 1)
		refused(drop("busy", sink.ActiveWithin, false), `consumer "c" was active`)
		f.Must(drop("busy", 0, false)) // it has not been read for that long

		f.group("done", "0")
		f.ack("done", f.read("done", 3)...)
		if sure {
			f.Must(drop("done", 0, false))
		} else {
			refused(drop("done", 0, false), "cannot tell")
			f.Must(drop("done", 0, true))
		}

		f.group("ordered", "0")
		lease := "{" + stream + "}:lease:ordered"
		f.do("SET", lease, "me|5f|3", "PX", "60000")
		refused(drop("ordered", sink.ActiveWithin, false), `consumer "me"`)
		f.Must(drop("ordered", sink.ActiveWithin, true))
		if n, err := f.client.Exists(ctx, lease).Result(); err != nil || n != 0 {
			t.Errorf("the lease is still there (%v)", err)
		}
		if n, err := f.client.XLen(ctx, stream).Result(); err != nil || n != 3 {
			t.Errorf("%d entries in the stream (%v), want 3", n, err)
		}
	})
}

// An abandoned group is what keeps a stream from being trimmed; without it the stream is shortened at once.
func TestDropGroupFreesTrimming(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{MaxLen: 100}, 1000)
	f.group("abandoned", "0")
	f.group("alive", "0")
	f.ack("alive", f.read("alive", 1000)...)
	f.wantTrimmed(1)
	f.Must(sink.DropGroup(t.Context(), f.client, stream, "abandoned", sink.ActiveWithin, false))
	f.wantTrimmed(901)
}

// A consumer that waits for entries is alive, however long ago the last one came, on a server that can tell.
func TestDropGroupSeesWhoWaits(t *testing.T) {
	t.Parallel()
	f := on(t, testenv.Valkey(t), sink.Options{})
	f.ago(time.Hour, 1)
	f.group("g", "0")
	f.ack("g", f.read("g", 1)...)
	// Longer ago than its last entry but less than its last attempt. The check runs right after an attempt, because a
	// busy machine may delay the next one of a concurrent reader indefinitely.
	const active = 6 * time.Second
	testenv.Eventually(t, 30*time.Second, func() error {
		err := f.server.Client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
			Group: "g", Consumer: "c", Streams: []string{stream, ">"}, Block: 50 * time.Millisecond,
		}).Err()
		if !errors.Is(err, redis.Nil) {
			t.Fatalf("read: %v", err)
		}
		v, err := f.server.Client.XInfoConsumers(t.Context(), stream, "g").Result()
		f.Must(err)
		if v[0].Inactive < active+500*time.Millisecond || v[0].Idle > active/2 {
			return fmt.Errorf("inactive for %v, tried %v ago", v[0].Inactive, v[0].Idle)
		}
		return nil
	})
	var held *sink.ActiveError
	if err := sink.DropGroup(t.Context(), f.client, stream, "g", active, false); !errors.As(err, &held) {
		t.Fatalf("a group that is read was dropped: %v", err)
	}
}

// A group of a type that has several streams is as bad as on the worst of them, and counts what there is on all.
func TestGroupsOfTypes(t *testing.T) {
	t.Parallel()
	bases := outbox.Bases([]outbox.Stream{
		{Name: "order", Base: "order"},
		{Name: "order.0", Base: "order"},
		{Name: "order.10", Base: "order"},
		{Name: "order.3", Base: "order.3"},
		{Name: "user.1", Base: "user"},
	})
	list := sink.GroupsOfTypes([]sink.Group{
		{Stream: "order", Name: "a", Length: 5, Consumers: 2, Lost: -1, Seen: time.Minute},
		{Stream: "order", Name: "b", Lag: 1},
		{Stream: "order.0", Name: "a", Length: 7, Consumers: 3, Pending: 2, Lag: 5, Lost: 4, HoldsBack: 1, Seen: -1},
		{
			Stream: "order.10", Name: "a", Length: 1, Pending: 1, Lag: 1, HoldsBack: 2, Waits: 3 * time.Hour,
			Idle: 2 * time.Hour, OldestPending: time.Second, Seen: 2 * time.Hour,
		},
		{Stream: "order.3", Name: "a", Lag: 9},
		{Stream: "other.1", Name: "a", Lag: 8},
		{Stream: "user.1", Name: "a", Lag: -1},
	}, bases)
	var said []string
	for _, g := range list {
		var on []string
		for _, s := range g.Streams {
			on = append(on, s.Stream)
		}
		said = append(said, fmt.Sprint(g.Stream, " ", g.Name, " ", g.Lag, " ", on))
	}
	want := []string{
		"order a 6 [order.0 order.10 order]", "order b 1 []", "order.3 a 9 []", "other.1 a 8 []", "user a -1 [user.1]",
	}
	if !slices.Equal(said, want) {
		t.Errorf("got %q, want %q", said, want)
	}
	sum := list[0]
	sum.Streams = nil
	if wanted := (sink.Group{
		Stream: "order", Name: "a", Length: 13, Consumers: 3, Pending: 3, Lag: 6, Lost: 4, HoldsBack: 3,
		Waits: 3 * time.Hour, Idle: 2 * time.Hour, OldestPending: time.Second, Seen: time.Minute,
	}); !reflect.DeepEqual(sum, wanted) || !sum.Abandoned() {
		t.Errorf("got %+v, want %+v", sum, wanted)
	}
	unknown := sink.GroupsOfTypes([]sink.Group{
		{Stream: "order", Name: "a", Lag: 2},
		{Stream: "order.0", Name: "a", Lag: -1, Lost: -1},
		{Stream: "order.10", Name: "a"},
	}, bases)
	if g := unknown[0]; g.Lag != -1 || g.Lost != -1 || g.Seen != 0 {
		t.Errorf("got %+v, want that what is unread and lost is unknown", g)
	}
}
