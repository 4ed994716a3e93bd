package jetstream_test

import (
	"net"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"posthaste/outbox"
	"posthaste/sink/jetstream"
)

// counting is a dialer that counts the bytes that its connections read.
type counting struct{ read atomic.Int64 }

func (d *counting) Dial(network, address string) (net.Conn, error) {
	c, err := net.Dial(network, address) //nolint:noctx // of the client's interface
	return &counted{c, d}, err
}

type counted struct {
	net.Conn
	by *counting
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.by.read.Add(int64(n))
	return n, err
}

// A claim reads the batches that it inherits, and not the events after them: a stream may have a gigabyte of those.
func TestInheritedIsReadAlone(t *testing.T) {
	t.Parallel()
	f, d := newFixture(t), &counting{}
	s, o, l := f.adopted(1, jetstream.Options{Connection: []nats.Option{nats.SetCustomDialer(d)}})
	claim := func(n int64) outbox.LanePublisher {
		return s.Lane(order, o, outbox.Lane{Part: 3, Claim: n, Nonce: outbox.Nonce{byte(n)}})
	}
	events := makeEvents(1500)
	f.publish(claim(1), events[0])
	f.publish(l, events[1:]...)
	before := d.read.Load()
	if r := f.publish(claim(2), events[0]); r.Suppressed != 1 {
		t.Errorf("%d events were suppressed, want 1", r.Suppressed)
	}
	if read := d.read.Load() - before; read > 50<<10 {
		t.Errorf("%d bytes were read for an event", read)
	}
	f.want(events...)
}
