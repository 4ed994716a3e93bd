package jetstream_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/sink/jetstream"
	"posthaste/sink/sinktest"
)

func TestConforms(t *testing.T) {
	t.Parallel()
	sinktest.Run(t, func(t *testing.T) sinktest.Target { return newFixture(t).target() })
}

// TestClusterConforms runs the suite on three nodes, which all have each stream. Nodes need seconds to elect their
// leaders, so a case leaves its cluster, without streams, to a later one.
func TestClusterConforms(t *testing.T) {
	t.Parallel()
	free := make(chan *server, 100)
	sinktest.Run(t, func(each *testing.T) sinktest.Target {
		var s *server
		select {
		case s = <-free:
			s.tb = each
		default:
			s = startServer(t, 3)
			s.tb = each
			s.start()
		}
		f := &fixture{Fixture: sinktest.Fixture{TB: each, Source: source}, server: s, nc: s.client()}
		each.Cleanup(func() {
			var list struct{ Streams []string }
			f.call("STREAM.NAMES", nil, &list)
			for _, name := range list.Streams {
				f.call("STREAM.DELETE."+name, nil, nil)
			}
			free <- s
		})
		o := f.target()
		o.Restart = nil // the cluster's name stays, and so do the acknowledged events
		o.Undurable = func() (stream.Sink, func()) {
			f.Must(f.open(jetstream.Options{Replicas: 1}).Regroup(each.Context(), "outbox.order", []string{"g"}))
			return f.open(jetstream.Options{Fsync: true}), func() {
				f.update("outbox.order", map[string]any{"num_replicas": 3})
			}
		}
		return o
	})
}

var errLost = errors.New("lost by the test")

// fixture is a server and what tests do to it.
type fixture struct {
	sinktest.Fixture
	server *server
	nc     *natslog.Log
	faults
}

// faults make batches fail.
type faults struct {
	before, after, hold atomic.Int32
	batches             atomic.Int32
	mu                  sync.Mutex
	held                []*nats.Msg
}

func newFixture(t testing.TB) *fixture { return newCluster(t, 1) }

// newCluster is a fixture with nodes, of which change changes the first one.
func newCluster(t testing.TB, nodes int, change ...func(n *node)) *fixture {
	t.Helper()
	s := startServer(t, nodes)
	for _, f := range change {
		f(&s.nodes[0])
	}
	s.start()
	return &fixture{Fixture: sinktest.Fixture{TB: t, Source: source}, server: s, nc: s.client()}
}

// open returns a sink of another process.
func (f *fixture) open(o jetstream.Options) *jetstream.Sink {
	o.URL = f.server.url()
	o.Replicas = cmp.Or(o.Replicas, len(f.server.nodes))
	if o.Source == "" {
		o.Source = "/posthaste/test"
	}
	s := jetstream.New(o)
	f.Cleanup(s.Close)
	s.SetFault(f.fault)
	return s
}

func (f *faults) fault(messages []*nats.Msg, send func() error) error {
	f.batches.Add(1)
	switch {
	case take(&f.before):
		return errLost
	case take(&f.hold):
		f.mu.Lock()
		defer f.mu.Unlock()
		for i, m := range messages {
			c := &nats.Msg{Subject: m.Subject, Data: m.Data, Header: nats.Header{}}
			for k, v := range m.Header {
				c.Header[k] = v
			}
			c.Header.Set("Nats-Batch-Id", "late")
			c.Header.Set("Nats-Batch-Sequence", fmt.Sprint(i+1))
			if i == len(messages)-1 {
				c.Header.Set("Nats-Batch-Commit", "1")
			}
			f.held = append(f.held, c)
		}
		return errLost
	case f.after.Load() > 0:
		if err := send(); err != nil {
			return err
		}
		take(&f.after)
		return errLost
	}
	return send()
}

func take(n *atomic.Int32) bool {
	if n.Load() <= 0 {
		return false
	}
	return n.Add(-1) >= 0
}

// arrive sends the messages that were held, and waits for the answer.
func (f *fixture) arrive() {
	f.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	last := len(f.held) - 1
	for _, m := range f.held[:last] {
		f.Must(f.nc.PublishMsg(m))
	}
	reply, err := f.nc.RequestMsg(f.held[last], time.Second)
	if errors.Is(err, nats.ErrNoResponders) {
		return
	}
	f.Must(err)
	f.Logf("a late batch: %s", reply.Data)
}

// call makes a request of the API, also after the test.
func (f *fixture) call(subject string, body map[string]any, out any) {
	f.Helper()
	if body == nil {
		body = map[string]any{}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(f.Context()), 10*time.Second)
	defer cancel()
	f.Must(f.nc.Ask(ctx, subject, body, out))
}

type info struct {
	Config map[string]any `json:"config"`
	State  struct {
		First uint64 `json:"first_seq"`
		Last  uint64 `json:"last_seq"`
	} `json:"state"`
}

// info returns the state of a stream, and false if it does not exist.
func (f *fixture) info(name string) (i info, ok bool) {
	f.Helper()
	reply, err := f.nc.Request("$JS.API.STREAM.INFO."+jetstream.StreamName(name), nil, 5*time.Second)
	f.Must(err)
	f.Must(json.Unmarshal(reply.Data, &i))
	return i, i.Config != nil
}

// gate returns the subject that matches the gate of a stream.
func (i info) gate() string {
	for _, s := range i.Config["subjects"].([]any) {
		if strings.HasPrefix(s.(string), "posthaste-gate.") {
			return s.(string)
		}
	}
	return ""
}

// each passes the messages of a stream to visit.
func (f *fixture) each(name string, visit func(m *nats.RawStreamMsg)) {
	f.Helper()
	i, ok := f.info(name)
	if !ok {
		return
	}
	for seq := max(i.State.First, 1); seq <= i.State.Last; seq++ {
		m, err := f.nc.JS.GetMsg(jetstream.StreamName(name), seq, nats.DirectGet())
		if errors.Is(err, nats.ErrMsgNotFound) {
			continue
		}
		f.Must(err)
		visit(m)
	}
}

func (f *fixture) stored(name string) (ids []uuid.UUID) {
	f.each(name, func(m *nats.RawStreamMsg) {
		if id, err := uuid.Parse(m.Header.Get("ce-id")); err == nil {
			ids = append(ids, id)
		}
	})
	return ids
}

// led waits until a stream has a leader, or the servers say that it does not exist.
func (f *fixture) led(name string) {
	f.Helper()
	testenv.Eventually(f, 20*time.Second, func() error {
		reply, err := f.nc.Request("$JS.API.STREAM.INFO."+jetstream.StreamName(name), nil, 100*time.Millisecond)
		if err == nil && strings.Contains(string(reply.Data), `"error"`) &&
			!strings.Contains(string(reply.Data), `"err_code":10059`) {
			err = fmt.Errorf("the leader of stream %s: %s", name, reply.Data)
		}
		return err
	})
}

func (f *fixture) purge(name, subject string) {
	f.Helper()
	f.call("STREAM.PURGE."+jetstream.StreamName(name), map[string]any{"filter": subject}, nil)
}

// create makes a JetStream stream with the subjects of an outbox's, as another program does.
func (f *fixture) create(name string, settings map[string]any) {
	f.Helper()
	body := map[string]any{
		"name": jetstream.StreamName(name), "subjects": []string{jetstream.EventsFilter(name)},
	}
	maps.Copy(body, settings)
	f.call("STREAM.CREATE."+jetstream.StreamName(name), body, nil)
}

func (f *fixture) update(name string, change map[string]any) {
	f.Helper()
	f.Must(f.nc.Set(f.Context(), name, change))
}

func (f *fixture) target() sinktest.Target {
	return sinktest.Target{
		Open:   func() stream.Sink { return f.open(jetstream.Options{MaxLen: 20}) },
		Stored: f.stored,
		Lose: func(n int, arrive bool) {
			if arrive {
				f.after.Store(int32(n))
			} else {
				f.before.Store(int32(n))
			}
		},
		Late: func() func() {
			f.hold.Store(1)
			return f.arrive
		},
		Poison: func(e *outbox.Record) { e.Payload = []byte(`"` + strings.Repeat("x", 2<<20) + `"`) },
		Refuse: func(name string) func() {
			f.update(name, map[string]any{"max_bytes": 1, "discard": "new"})
			return func() { f.update(name, map[string]any{"max_bytes": -1, "discard": "old"}) }
		},
		Restart: f.server.restart,
		Save: func() func() {
			restore := f.server.save()
			return func() {
				restore()
				f.led("outbox.order")
			}
		},
		Add: func(name string) {
			_, err := f.nc.Request(jetstream.EventSubject(name, "somebody"), []byte("else"), 5*time.Second)
			f.Must(err)
		},
		// The gate is in the same stream, so what deletes the events alone is a purge of their subjects.
		Drop: func(name string) { f.purge(name, jetstream.EventsFilter(name)) },
		DropGate: func(name string, _ uuid.UUID) {
			i, _ := f.info(name)
			f.purge(name, i.gate())
		},
		// The gate goes back if its newest messages are deleted.
		SaveGate: func(name string, _ uuid.UUID) func() {
			before, _ := f.info(name)
			return func() {
				root := strings.TrimSuffix(before.gate(), "*")
				f.each(name, func(m *nats.RawStreamMsg) {
					if m.Sequence > before.State.Last && strings.HasPrefix(m.Subject, root) {
						f.call("STREAM.MSG.DELETE."+jetstream.StreamName(name), map[string]any{"seq": m.Sequence}, nil)
					}
				})
			}
		},
		Read: func(name, group string, n int) {
			sub, err := f.nc.JS.PullSubscribe(jetstream.EventsFilter(name), jetstream.ConsumerName(group),
				nats.Bind(jetstream.StreamName(name), jetstream.ConsumerName(group)))
			f.Must(err)
			for n > 0 {
				list, err := sub.Fetch(min(n, 100))
				f.Must(err)
				for _, m := range list {
					f.Must(m.AckSync())
				}
				n -= len(list)
			}
		},
	}
}

const order = "outbox.order"

var (
	source     = uuid.New()
	makeEvents = sinktest.Events
	streamLane = sinktest.StreamLane
	ids        = sinktest.IDs
)
