package consumer_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// holdRead keeps a read, which contains text, from reaching the server, and what follows it on its connection. It
// returns when that has happened.
func holdRead(tb testing.TB, h *testenv.Link, text string) {
	tb.Helper()
	h.HoldFrom(text)
	testenv.Eventually(tb, 20*time.Second, func() error {
		return testenv.FailIf(h.Held(text) == 0, "no read is held")
	})
}

// waitPending waits until there is a group with at least so many entries pending.
func waitPending(tb testing.TB, client *redis.Client, least int64) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		p := client.XPending(tb.Context(), "outbox.order", "g").Val()
		return testenv.FailIf(p == nil || p.Count < least, "pending %+v, want at least %d", p, least)
	})
}

// gated handles events while the gate is open, and records their order.
type gated struct {
	record
	open chan struct{}
}

func (g *gated) handle(ctx context.Context, ev consumer.Event) error {
	select {
	case <-g.open:
	case <-ctx.Done():
		return consumer.Unavailable(ctx.Err())
	}
	return g.record.handle(ctx, ev)
}

// A read is in a socket when the client gives it up and reads on over another connection; it arrives long after. What
// it would hand out is not passed over by newer events of the same subjects.
func TestALateReadKeepsTheOrder(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Second})
	defer client.Close()
	rec := gated{open: make(chan struct{})}
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: client, Window: lateWindow, ClaimIdle: 2 * time.Second, Handler: rec.handle, Logger: logTo(logs),
	})
	waitPending(t, r.Client, 0)
	holdRead(t, h, "xreadgroup")
	logs.wait(t, "redis answers again") // on a new connection
	rec.whileLate(t, r, h)
	must(t, c.stop())
}

// lateWindow is the window of a consumer one of whose reads is late.
const lateWindow = 64

// whileLate adds events while a read is held, of which the consumer reads as many as it has room for, and then lets the
// read go on. All of them run in order.
func (g *gated) whileLate(tb testing.TB, r *testenv.RedisServer, h *testenv.Link) {
	tb.Helper()
	ids := fill(tb, r.Client, "outbox.order", 400, 8)
	waitPending(tb, r.Client, lateWindow/2+1) // the next read has no room
	h.Release()
	testenv.Becomes(tb, "connections that are left over", 0, h.Late)
	close(g.open)
	eventuallyRan(tb, &g.record, 20*time.Second, len(ids))
	inOrder(tb, &g.record)
}

// The same in ordered mode, where another consumer continues: the lease was valid when the read was sent.
func TestALateReadDoesNotPassTheLease(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Second})
	defer client.Close()
	rec := gated{open: make(chan struct{})}
	var none record
	opt := consumer.Options{Window: lateWindow, ClaimIdle: 2 * time.Second, Ordered: true}
	cut, logs := opt, &syncBuffer{}
	cut.Client, cut.Handler, cut.Logger, cut.Consumer = client, none.handle, logTo(logs), "cut"
	start(t, cut)
	logs.wait(t, "lease taken")
	waitPending(t, r.Client, 0)
	other, logs := opt, &syncBuffer{}
	other.Client, other.Handler, other.Logger = r.Client, rec.handle, logTo(logs)
	holdRead(t, h, "\r\ncut|") // with the lease that allows it
	h.Hold(true)               // the lease is not renewed any more
	start(t, other)
	logs.wait(t, "lease taken")
	rec.whileLate(t, r, h)
	testenv.Equal(t, "events that ran with the consumer that was cut off", len(none.list()), 0)
}

// losing is a connection that loses one reply in which text is, and breaks.
type losing struct {
	net.Conn
	text []byte
	lost *atomic.Bool
}

func (l *losing) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	if bytes.Contains(b[:n], l.text) && l.lost.CompareAndSwap(false, true) {
		_ = l.Close()
		return 0, io.EOF
	}
	return n, err
}

// The reply to a read is lost. What it had handed out is not passed over by what is behind it: the client is not to
// repeat the read by itself.
func TestALostReplyKeepsTheOrder(t *testing.T) {
	t.Parallel()
	for name, ordered := range map[string]bool{"a group": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			var lost atomic.Bool
			client := redis.NewClient(&redis.Options{
				Addr: r.Addr(),
				Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
					c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
					return &losing{Conn: c, text: []byte("subject"), lost: &lost}, err
				},
			})
			defer client.Close()
			ids := fill(t, r.Client, "outbox.order", 2000, 1)
			var rec record
			c := start(t, consumer.Options{Client: client, Handler: rec.handle, Ordered: ordered})
			eventuallyRan(t, &rec, 20*time.Second, len(ids))
			inOrder(t, &rec)
			if !lost.Load() {
				t.Error("no reply was lost")
			}
			must(t, c.stop())
		})
	}
}

// Consumers that share the fewest connections all come to their turn: none keeps one for good.
func TestConsumersShareAPool(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	client := redis.NewClient(&redis.Options{Addr: r.Addr(), PoolSize: 2})
	defer client.Close()
	ids := fill(t, r.Client, "outbox.order", 50, 5)
	recs := make([]record, 3)
	for i := range recs {
		start(t, consumer.Options{Client: client, Group: fmt.Sprintf("g%d", i), Handler: recs[i].handle})
	}
	for i := range recs {
		eventuallyRan(t, &recs[i], 30*time.Second, len(ids))
	}
}

// inOrder checks that the events of each subject ran in ascending order.
func inOrder(tb testing.TB, rec *record) {
	tb.Helper()
	last := map[string]int{}
	behind := 0
	for _, ev := range rec.list() {
		if n := number(tb, ev); n < last[ev.Subject] {
			behind++
		} else {
			last[ev.Subject] = n
		}
	}
	testenv.Equal(tb, "events that ran behind newer ones of their subject", behind, 0)
}

// A server that lacks deliveries, because it was a replica that was behind, has not delivered what waits in memory. The
// successors of such an event do not pass it before it is delivered again.
func TestAGroupThatIsBehindKeepsTheOrder(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	h := testenv.NewLink(t, r.Addr())
	client := redis.NewClient(&redis.Options{Addr: h.Addr(), ReadTimeout: time.Minute, MaxRetries: -1})
	defer client.Close()
	const wait = 3 * time.Second
	var rec record
	var runs atomic.Int64
	failed := make(chan struct{})
	start(t, consumer.Options{
		Client: client, Backoff: func(int) time.Duration { return wait },
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.ID == "first" && runs.Add(1) == 1 {
				close(failed)
				return errBoom
			}
			return rec.handle(ctx, ev)
		},
	})
	add(t, r.Client, "outbox.order", event{"first", "s", 1})
	add(t, r.Client, "outbox.order", event{"second", "s", 2})
	<-failed
	since := time.Now()
	waitPending(t, r.Client, 2)
	h.HoldFrom("xreadgroup")
	testenv.Becomes(t, "reads on their way", 1, func() int { return h.Held("xreadgroup") })
	_, err := r.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		p.XGroupDestroy(t.Context(), "outbox.order", "g")
		p.XGroupCreate(t.Context(), "outbox.order", "g", "0")
		return nil
	})
	must(t, err)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(len(rec.list()) == 0 && time.Since(since) < 2*wait, "it is not yet tried again")
	})
	h.Release()
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	inOrder(t, &rec)
	testenv.Equal(t, "successful runs of the first event", rec.times()["first"], 1)
}
