package idem

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// deaf is a client hook that drops one reply: the server has sent it, and the connection ends before the client reads
// it.
type deaf struct {
	next atomic.Bool
}

func (*deaf) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (*deaf) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

type deafConn struct {
	net.Conn
	deaf *deaf
}

func (d *deaf) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := next(ctx, network, addr)
		return deafConn{c, d}, err
	}
}

func (c deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.deaf.next.CompareAndSwap(true, false) {
		_ = c.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// A reply is lost after the script ran; the client sends it again, and nothing is different.
func TestLostRepliesOfEveryScript(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	d := &deaf{}
	g.client.AddHook(d)
	// loses runs f while the reply of its first command is lost, and nothing after it.
	loses := func(name string, f func()) {
		t.Helper()
		ran := calls(t, r, "evalsha")
		d.next.Store(true)
		f()
		testenv.Equal(t, name+": how often it was sent", calls(t, r, "evalsha")-ran, 2)
	}
	for _, end := range []string{"commit", "abort"} {
		warm := begin(t, g, request("warm "+end, "a")).Ticket // so that no script has to be loaded
		warm.Abort(t.Context())
		warm.Commit(t.Context(), result)
		_ = warm.Heartbeat(t.Context())
		req := request(end, "a")
		var got Decision
		loses("acquire", func() { got = begin(t, g, req) })
		wantGuarded(t, got, true)
		loses("heartbeat", func() {
			testenv.ErrorIs(t, "heartbeat", got.Ticket.Heartbeat(t.Context()), nil)
		})
		if end == "commit" {
			loses("publish", func() { got.Ticket.Commit(t.Context(), result) })
			hasPrefix(t, rawRecord(t, r.Client, req.Key), "C|")
			continue
		}
		loses("release", func() { got.Ticket.Abort(t.Context()) })
		testenv.Equal(t, "what is left behind", rawRecord(t, r.Client, req.Key), "")
	}
}

// A newer version wrote the record, with a fingerprint that this one cannot compare: the database can.
func TestARecordOfALaterVersionIsLeftToTheDatabase(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	later := request("k", "a")
	later.Fingerprint = NewFingerprint(9, "a")
	begin(t, guardOn(t, r.URL()), later).Ticket.Commit(t.Context(), result)
	req := request("k", "a")
	for matches, want := range map[bool]Outcome{true: Replay, false: Mismatch} {
		req.Lookup = func(context.Context) (Found, error) {
			return Found{Exists: true, Matches: matches, Record: result}, nil
		}
		wantOutcome(t, begin(t, g, req), want)
	}
}

// The same for a request that waited for the newer version's attempt, and found the record by polling.
func TestWhoWaitsForALaterVersionAsksTheDatabase(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	later := request("k", "a")
	later.Fingerprint = NewFingerprint(9, "a")
	ticket := begin(t, guardOn(t, r.URL()), later).Ticket
	var committed atomic.Bool
	req := request("k", "a")
	req.Wait = time.Hour
	req.Lookup = func(context.Context) (Found, error) {
		return Found{Exists: committed.Load(), Matches: true, Record: result}, nil
	}
	waits := make(chan Decision)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		d, _ := g.Begin(ctx, req)
		waits <- d
	}()
	testenv.Becomes(t, "waiters", 1, func() int { return waiting(g, req.Key) })
	committed.Store(true)
	ticket.Commit(t.Context(), result)
	wantOutcome(t, <-waits, Replay)
}

func TestTheCacheForgets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCache(2, 50*time.Millisecond)
		a, b, d := NewKey("a"), NewKey("b"), NewKey("d")
		c.put(a, "f", result)
		c.put(b, "f", result)
		if _, _, ok := c.get(a); !ok {
			t.Error("a is forgotten at once")
		}
		c.put(d, "f", result)
		if _, _, ok := c.get(b); ok {
			t.Error("the one used longest ago is still there")
		}
		<-time.After(50 * time.Millisecond)
		if _, _, ok := c.get(a); !ok {
			t.Error("the one just used is gone before its time")
		}
		<-time.After(time.Nanosecond)
		if _, _, ok := c.get(a); ok {
			t.Error("the one just used stays forever")
		}
	})
}
