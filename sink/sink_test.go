package sink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sink/sinktest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

const (
	stream   = "outbox.order"
	register = "{outbox.order}:gate"
)

// fixture is a sink on a Redis server of its own.
type fixture struct {
	sinktest.Fixture
	server *testenv.RedisServer
	client redis.UniversalClient
	sink   *sink.Sink
	reg    *prometheus.Registry
}

func newFixture(t testing.TB, config ...string) *fixture {
	t.Helper()
	return on(t, testenv.Redis(t, config...), sink.Options{})
}

// on makes a fixture with a client of the product's kind.
func on(t testing.TB, server *testenv.RedisServer, o sink.Options) *fixture {
	t.Helper()
	c := dial(t, server.URL())
	f := &fixture{Fixture: sinktest.Fixture{TB: t, Source: uuid.New()}, server: server, client: c}
	f.sink, f.reg = newSink(t, c, o)
	return f
}

// dial returns a client of the product's kind.
func dial(t testing.TB, url string) redis.UniversalClient {
	t.Helper()
	c, err := sink.NewClient(url)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func newSink(t testing.TB, c redis.UniversalClient, o sink.Options) (*sink.Sink, *prometheus.Registry) {
	reg := prometheus.NewPedanticRegistry()
	o.Client, o.Registerer = c, reg
	if o.Logger == nil {
		o.Logger = testenv.Logger(t)
	}
	if o.Source == "" {
		o.Source = "/posthaste/test"
	}
	return sink.New(o), reg
}

// through returns a sink whose connections go through a proxy.
func (f *fixture) through(p *testenv.Link) *sink.Sink {
	f.Helper()
	s, _ := newSink(f, dial(f, "redis://"+p.Addr()), sink.Options{})
	return s
}

// gate is the key of the database's gate.
func (f *fixture) gate() string { return register + ":" + f.Source.String() }

// adopted raises the gate and returns the owner.
func (f *fixture) adopted(epoch int64) outbox.Owner {
	f.Helper()
	o := f.Owner(epoch)
	f.Must(f.sink.Adopt(f.Context(), stream, o, false))
	return o
}

func partLane(part int, claim int64) outbox.Lane {
	return outbox.Lane{Part: part, Claim: claim, Nonce: nonce()}
}

// lane opens the stream lane.
func (f *fixture) lane(o outbox.Owner) outbox.LanePublisher {
	return f.sink.Lane(stream, o, streamLane(o))
}

var (
	makeEvents = sinktest.Events
	streamLane = sinktest.StreamLane
	nonce      = sinktest.Nonce
	wantFenced = sinktest.WantFenced
	wantGap    = sinktest.WantGap
)

func makeEvent() *outbox.Record { return makeEvents(1)[0] }

// big returns an event with a payload of n bytes.
func big(n int) *outbox.Record {
	e := makeEvent()
	e.Payload = append(append([]byte{'"'}, bytes.Repeat([]byte{'x'}, n-2)...), '"')
	return e
}

// stored returns the ids of a stream's entries in order, and none for an entry that is no event.
func (f *fixture) stored(name string) []uuid.UUID {
	f.Helper()
	entries, err := f.server.Client.XRange(f.Context(), name, "-", "+").Result()
	f.Must(err)
	ids := make([]uuid.UUID, len(entries))
	for i, e := range entries {
		ids[i], _ = uuid.Parse(fmt.Sprint(e.Values["id"]))
	}
	return ids
}

// wantStored is the oracle: exactly these events, in this order, once each.
func (f *fixture) wantStored(events ...*outbox.Record) {
	f.Helper()
	if got := f.stored(stream); !slices.Equal(got, sinktest.IDs(events)) {
		f.Fatalf("the stream has %d entries %v, want %d %v", len(got), got, len(events), sinktest.IDs(events))
	}
}

// wantLast checks that the receipt names the stream's last entry.
func (f *fixture) wantLast(r outbox.Receipt) {
	f.Helper()
	got, err := f.server.Client.XRevRangeN(f.Context(), stream, "+", "-", 1).Result()
	f.Must(err)
	if len(got) != 1 || got[0].ID != r.Last {
		f.Fatalf("the last entry is %v, and the receipt says %q", got, r.Last)
	}
}

// fields returns the gate's fields with the prefix.
func (f *fixture) fields(prefix string) []string {
	f.Helper()
	keys, err := f.server.Client.HKeys(f.Context(), f.gate()).Result()
	f.Must(err)
	var found []string
	for _, k := range keys {
		if strings.HasPrefix(k, prefix) {
			found = append(found, k)
		}
	}
	return found
}

// wantDoubt checks the doubt set and its counter.
func (f *fixture) wantDoubt(n int) {
	f.Helper()
	count, err := f.server.Client.HGet(f.Context(), f.gate(), "doubt").Int()
	if err != nil && !errors.Is(err, redis.Nil) {
		f.Fatal(err)
	}
	if got := len(f.fields("d:")); got != n || count != n {
		f.Fatalf("%d events in doubt and a counter of %d, want %d", got, count, n)
	}
}

func (f *fixture) do(args ...any) {
	f.Helper()
	f.Must(f.server.Client.Do(f.Context(), args...).Err())
}

// metric sums a metric over the labels that fit.
func (f *fixture) metric(name string, labels ...string) float64 {
	f.Helper()
	v, _ := lookup(f, f.reg, name, labels...)
	return v
}

func (f *fixture) wantMetric(name string, v float64, labels ...string) {
	f.Helper()
	if got := f.metric(name, labels...); got != v {
		f.Errorf("%s%v is %v, want %v", name, labels, got, v)
	}
}

func lookup(t testing.TB, reg *prometheus.Registry, name string, labels ...string) (float64, bool) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum, found := 0.0, false
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if fits(m, labels) {
				found = true
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum, found
}

func fits(m *dto.Metric, labels []string) bool {
	for i := 0; i+1 < len(labels); i += 2 {
		ok := false
		for _, l := range m.GetLabel() {
			ok = ok || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
		}
		if !ok {
			return false
		}
	}
	return true
}

func wantClass(t testing.TB, err error, class string) {
	t.Helper()
	if got := sink.Class(err); got != class {
		t.Fatalf("class %q of %v, want %s", got, err, class)
	}
}

func wantErr(tb testing.TB, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("got %v, want %v", err, want)
	}
}

// retry publishes until it succeeds; only errors of the class may come before that, and the end of its own patience.
func retry(t testing.TB, d outbox.Delivery, classes ...string) outbox.Receipt {
	t.Helper()
	var receipt outbox.Receipt
	testenv.Eventually(t, 20*time.Second, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, err := d.Publish(ctx)
		if err == nil {
			receipt = r
			return nil
		}
		for _, c := range classes {
			if sink.Class(err) == c {
				return err
			}
		}
		if ctx.Err() != nil {
			return err
		}
		t.Fatalf("class %q of %v, want one of %v", sink.Class(err), err, classes)
		return nil
	})
	return receipt
}
