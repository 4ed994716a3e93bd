package sink_test

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sink/sinktest"
)

// bound makes a fixture whose client stays with one process of Redis.
func bound(t *testing.T, url string, server *testenv.RedisServer) *fixture {
	t.Helper()
	f := boundTo(t, url, sink.Options{})
	f.server = server
	return f
}

// boundTo makes a fixture whose client stays with the processes at url.
func boundTo(t *testing.T, url string, o sink.Options) *fixture {
	t.Helper()
	parsed, err := redisurl.Parse(url)
	testenv.Must(t, err)
	f := &fixture{Fixture: sinktest.Fixture{TB: t, Source: uuid.New()}}
	f.client, o.Server = sink.NewBoundClient(parsed)
	t.Cleanup(func() { _ = f.client.Close() })
	f.sink, f.reg = newSink(t, f.client, o)
	return f
}

// bind repeats Bind until Redis answers.
func (f *fixture) bind() (id string) {
	f.Helper()
	testenv.Eventually(f, 20*time.Second, func() (err error) {
		id, err = f.sink.Bind(f.Context())
		return err
	})
	return id
}

// moved publishes until the error reports another server; the error of a broken connection may come first.
func (f *fixture) moved(l outbox.LanePublisher) {
	f.Helper()
	d := l.Deliver(makeEvents(1))
	testenv.Eventually(f, 20*time.Second, func() error {
		_, err := d.Publish(f.Context())
		return testenv.FailIf(!errors.Is(err, outbox.ErrMoved), "published to another server: %w", err)
	})
}

// Nor is anything published to a server that was a replica in between and has another server's data, although its
// connections remained open.
func TestNothingIsPublishedToAServerPromotedInPlace(t *testing.T) {
	t.Parallel()
	server, other := testenv.Redis(t), testenv.Redis(t)
	f := bound(t, server.URL(), server)
	f.bind()
	l := f.lane(f.adopted(1))
	f.Publish(l, makeEvents(1)...)
	f.do("REPLICAOF", "127.0.0.1", fmt.Sprint(other.Port))
	f.do("REPLICAOF", "NO", "ONE")
	f.Must(f.sink.Ready(t.Context())) // which the relay asks every second
	f.moved(l)
}

// addYounger adds an entry whose id is younger than that of any event.
var addYounger = []any{"XADD", stream, "9999999999999-0", "somebody", "else"}

// The loss is also noticed if a third party has added entries and trimmed some before the next publish. Unsettled
// events are published again, because their entries are gone.
func TestAStreamMadeAnewIsAGap(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o := f.adopted(1)
	l := f.lane(o)
	events := makeEvents(3)
	f.Publish(l, events...)
	f.do("DEL", stream)
	f.do(addYounger...)
	f.do("XADD", stream, "*", "a", "b")
	f.do("XTRIM", stream, "MAXLEN", "1")
	wantGap(t, f.sink.Check(t.Context(), o, []string{stream}))
	wantGap(t, second(l.Deliver(makeEvents(1)).Publish(t.Context())))
	if st := f.look(); !st.Forgot {
		t.Errorf("looked at: %+v", st)
	}
	l = f.lane(f.adopted(2))
	f.do("XTRIM", stream, "MAXLEN", "0") // what somebody has added
	f.Publish(l, events...)
	f.wantStored(events...)
}

// If the gate is lost with the stream, or with its younger entries, the last entry in Postgres shows the loss. Trimmed
// entries are not lost.
func TestALostGateHidesNoLoss(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		delete, back, trim, want bool
	}{
		"deleted":  {delete: true, want: true},
		"put back": {delete: true, back: true, want: true},
		"trimmed":  {trim: true},
	} {
		f := newFixture(t)
		l := f.lane(f.adopted(1))
		f.Publish(l, makeEvents(2)...)
		f.do("XTRIM", stream, "MAXLEN", "1")
		old := f.server.Client.Dump(t.Context(), stream).Val()
		r := f.Publish(l, makeEvents(2)...)
		f.do("DEL", f.gate())
		if c.delete {
			f.do("DEL", stream)
		}
		if c.back {
			f.Must(f.server.Client.Restore(t.Context(), stream, 0, old).Err())
		}
		f.do(addYounger...)
		if c.trim {
			f.do("XTRIM", stream, "MAXLEN", "1")
		}
		states, err := f.sink.Look(t.Context(), f.Source, []string{stream}, map[string]string{stream: r.Last})
		if err != nil || states[0].Forgot != c.want {
			t.Errorf("%s: looked at: %+v, %v", name, states, err)
		}
	}
}

// The stream's last entry belongs to another writer and is older than the last lost entry: which of the gate's entries
// remain is unknown.
func TestAnotherEntryIsNoEndOfTheStream(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	l := f.lane(f.adopted(1))
	before := f.Publish(l, makeEvents(1)...)
	old := f.server.Client.Dump(t.Context(), stream).Val()
	f.Publish(l, makeEvents(3)...)
	f.Must(f.server.Client.RestoreReplace(t.Context(), stream, 0, old).Err())
	if st := f.look(); !st.Forgot || st.Last != before.Last {
		t.Errorf("put back: looked at %+v, want the last entry to be %s", st, before.Last)
	}
	entry := outbox.NewEntry(uuid.UUID{}, before.Last)
	entry.Number++
	f.do("XADD", stream, entry.String(), "somebody", "else")
	if st := f.look(); !st.Forgot || st.Last != "" {
		t.Errorf("put back and added to: looked at %+v, want no last entry", st)
	}
}

// Entries of a replay do not prove that earlier entries exist.
func TestAReplayDoesNotHideALoss(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	r := f.Publish(f.lane(f.adopted(1)), makeEvents(2)...)
	f.do("XADD", stream, "*", "id", "again", "replayed", "1")
	states, err := f.sink.Look(t.Context(), f.Source, []string{stream}, nil)
	if err != nil || states[0].Last != r.Last || states[0].Forgot {
		t.Errorf("looked at: %+v, %v; want the last entry to be %s", states, err, r.Last)
	}
}

// A primary that gets its first replica begins a new history, and has lost nothing.
func TestAFirstReplicaIsNoRestart(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	f := bound(t, server.URL(), server)
	f.bind()
	l := f.lane(f.adopted(1))
	f.Publish(l, makeEvents(1)...)
	history := func() string {
		return regexp.MustCompile(`master_replid:(\w+)`).FindString(server.Client.Info(t.Context(),
			"replication").Val())
	}
	before := history()
	replica := testenv.Redis(t, fmt.Sprintf("replicaof 127.0.0.1 %d", server.Port))
	testenv.Eventually(t, 20*time.Second, func() error {
		if !strings.Contains(replica.Client.Info(t.Context(), "replication").Val(), "master_link_status:up") {
			return errors.New("no link")
		}
		return nil
	})
	if history() == before {
		t.Fatal("the history goes on: not the case")
	}
	f.Must(f.sink.Ready(t.Context()))
	f.Publish(l, makeEvents(1)...)
}
