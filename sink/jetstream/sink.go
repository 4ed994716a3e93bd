package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/sink/metrics"
)

// Options configure a Sink.
type Options struct {
	// URL names the servers, separated by commas, and Connection has credentials, certificates and the like. The sink
	// connects when it is first used, and again when a connection has ended.
	URL        string
	Connection []nats.Option
	// Domain is the domain of JetStream; "" is that of the servers.
	Domain string
	// Source is the source of every event, for example /posthaste/default.
	Source string
	// Replicas is how many copies a stream has that the sink makes. With Fsync, Confirm also demands that many of
	// streams that exist.
	Replicas int
	// Fsync demands that an acknowledged event survives a crash of the machine. A server promises that with
	// sync_interval: always only, and no request of an ordinary client reveals that setting. Confirm verifies what a
	// client can know: that the stream is stored in files, is not written asynchronously (persist_mode), and has enough
	// replicas. The operator must verify sync_interval.
	Fsync bool
	// MaxLen is the approximate number of events to which Trim shortens a stream; 0 never trims.
	MaxLen int64
	// TrimForce lets Trim remove events that a consumer has not acknowledged.
	TrimForce bool
	// Registerer takes the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Sink publishes events to JetStream. It is safe for concurrent use.
type Sink struct {
	o Options

	mu    sync.Mutex // guards the following; it is held while the sink connects
	conn  *conn
	bound string
	known sync.Map // of *memory, by stream
	m     *metrics.Sink[struct{}]

	// send commits a batch. Tests replace it.
	send func(messages []*nats.Msg, commit func() (js.PubAck, error)) (js.PubAck, error)
}

var _ stream.Sink = (*Sink)(nil)

// New returns a sink. It does no I/O.
func New(o Options) *Sink {
	return &Sink{
		o: o, m: metrics.New[struct{}](o.Registerer, classes),
		send: func(_ []*nats.Msg, commit func() (js.PubAck, error)) (js.PubAck, error) { return commit() },
	}
}

// memory returns what is known of the gate of stream.
func (s *Sink) memory(stream string) *memory {
	m, _ := s.known.LoadOrStore(stream, &memory{})
	return m.(*memory)
}

// Missed implements stream.Sink.
func (s *Sink) Missed(streams int) { s.m.Errors.WithLabelValues("gap").Add(float64(streams)) }

// classes are all classes of errors. The sink for Redis has the same, and others.
var classes = []string{
	"timeout", "connection", "tls", "canceled", "durability", "restarted", "gap", "fenced", "foreign", metrics.Other,
	"masterdown", "noauth", "noperm", classTooLarge,
}

// classTooLarge is the class of poison.
const classTooLarge = "too_large"

func class(err error) string {
	switch {
	case errors.As(err, new(*DurabilityError)):
		return "durability"
	case errors.Is(err, nats.ErrNoResponders): // the stream has no leader
		return "masterdown"
	case errors.Is(err, nats.ErrPermissionViolation):
		return "noperm"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return "noauth"
	case errors.Is(err, nats.ErrTimeout):
		return "timeout"
	case errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrNoServers):
		return "connection"
	}
	return metrics.Class(err)
}

// failed counts an error, adds the step and the stream, and tells what concerns one stream.
func (s *Sink) failed(r *remote, step string, err error) error {
	if err == nil {
		return nil
	}
	s.m.Errors.WithLabelValues(class(err)).Inc()
	if metrics.Permanent(err) || outbox.Alone(err) || errors.As(err, new(*outbox.PoisonError)) {
		return err
	}
	if errors.As(err, new(*DurabilityError)) {
		return &outbox.StreamError{Stream: r.stream, Err: err}
	}
	wrapped := fmt.Errorf("%s stream %q: %w", step, r.stream, err)
	if errors.Is(err, context.Canceled) {
		return wrapped
	}
	answered := errors.As(err, new(*js.APIError)) || errors.As(err, new(*DeniedError))
	if hasCode(err, codeNoBatches) {
		return &outbox.StreamError{Stream: r.stream, Err: fmt.Errorf("%w%srun nats-server 2.12 or later, and set "+
			"allow_atomic of the JetStream stream %s", wrapped, outbox.RemedyMark, r.name)}
	}
	if hasCode(err, codeIncomplete, codeInsufficient, codeNoStorage, codeCreateFailed, codeStoreFailed) {
		wrapped = fmt.Errorf("%w%sif this persists, the disk of nats-server is probably full: free space, and "+
			"restart it", wrapped, outbox.RemedyMark)
	}
	wrapped = unanswered(wrapped)
	// The leader of one stream may be down while the others answer.
	if answered || r.conn != nil && r.nc.IsConnected() {
		return &outbox.StreamError{Stream: r.stream, Lost: !answered, Err: wrapped}
	}
	return wrapped
}

// on calls f, a step of one stream, with the connection.
func (s *Sink) on(ctx context.Context, step, stream string, f func(r *remote) error) error {
	c, err := s.open(ctx)
	if err != nil {
		return err
	}
	r := &remote{conn: c, stream: stream, name: StreamName(stream)}
	return s.failed(r, step, f(r))
}

// gravest returns the gravest error of streams, or err: one that is permanent, one that concerns all of them, or the
// first.
func gravest(errs []error, err error) error {
	for _, grave := range []func(error) bool{
		metrics.Permanent, func(err error) bool { return err != nil && !outbox.Alone(err) },
	} {
		if i := slices.IndexFunc(errs, grave); i >= 0 {
			return errs[i]
		}
	}
	return cmp.Or(append(errs, err)...)
}

// each calls f for streams[i] concurrently and returns the error of each; err if f was not called.
func (s *Sink) each(ctx context.Context, step string, streams []string, f func(r *remote, i int) error) (
	errs []error, err error,
) {
	c, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	errs = make([]error, len(streams))
	var all sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for i, stream := range streams {
		slots <- struct{}{}
		all.Go(func() {
			r := &remote{conn: c, stream: stream, name: StreamName(stream)}
			errs[i] = s.failed(r, step, f(r, i))
			<-slots
		})
	}
	all.Wait()
	return errs, nil
}

// parallel bounds how many streams are asked at once.
const parallel = 16
