package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

// Options configure a Consumer. Client, Group, Handler and one of Streams and Prefix are required.
type Options struct {
	// Client is the connection to Redis; the caller closes it after Run has returned. Reading takes one of its
	// connections for good, with a Cluster client one for every stream.
	Client redis.UniversalClient
	// Group is the consumer group. A new one starts at the first entry of each stream.
	Group string
	// Consumer is this process's name in the group. The default, host:pid:random, is never used twice. A name that is
	// the same at every start (and never used by two processes at once) lets a restarted process resume its own
	// unacknowledged entries at once instead of after ClaimIdle.
	Consumer string
	// Streams are the full names of the streams to read. Where a relay spreads the type of one over several
	// (outbox.order over outbox.order.0, outbox.order.1 …), those are read as well, from when they are there.
	Streams []string
	// Prefix, in place of Streams, selects every stream whose name begins with it, those that appear later included.
	// Dead streams are left out.
	Prefix string
	// Handler is called for every event. It must be safe for concurrent use.
	Handler Handler
	// Middleware wraps the handler; the first one is the outermost.
	Middleware []Middleware
	// Workers is how many events run at the same time. Default 8.
	Workers int
	// Window is how many events are held in memory, read but not yet acknowledged. Default 1000.
	Window int
	// ClaimIdle is how long an entry is left with a consumer that gives no sign of life before another one takes it
	// over. Default 15 s. A slow handler is no reason: entries in work are renewed.
	ClaimIdle time.Duration
	// MaxAttempts is how often an event is tried before it goes to the dead stream. Default 10. While nearly all events
	// fail, no attempt is counted. An event whose process has ended is tried once more, even if it is 1.
	MaxAttempts int
	// Backoff is the wait after the given failed attempt (1, 2, …). Default: 100 ms doubled up to 30 s, with jitter.
	Backoff func(attempt int) time.Duration
	// DrainTimeout bounds the orderly stop, in which running handlers may finish and their events are acknowledged.
	// Default 10 s.
	DrainTimeout time.Duration
	// Ordered extends the order per subject over all processes of the group: only one of them at a time reads a given
	// stream, and the others stand by for it.
	Ordered bool
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// validate fills in the defaults; its error names every fault.
func (o *Options) validate() error {
	var errs []error
	check := func(ok bool, text string) {
		if !ok {
			errs = append(errs, errors.New(text))
		}
	}
	switch c := o.Client.(type) {
	case nil:
		check(false, "no Redis client")
	case *redis.Client:
		check(c.Options().PoolSize > 1 && c.Options().MaxActiveConns != 1,
			"the Redis client's pool has one connection, which reading takes: PoolSize and MaxActiveConns must be at "+
				"least 2")
	case *redis.ClusterClient:
	default:
		check(false, fmt.Sprintf("a client of type %T is not supported", c))
	}
	check(o.Group != "", "no group")
	check(o.Handler != nil, "no handler")
	check((len(o.Streams) > 0) != (o.Prefix != ""), "either streams or a prefix must be given")
	check(!slices.Contains(o.Streams, ""), "the name of a stream is empty")
	for _, n := range []int{o.Workers, o.Window, o.MaxAttempts} {
		check(n >= 0, "workers, window and attempts cannot be negative")
	}
	check(o.ClaimIdle >= 0 && o.DrainTimeout >= 0, "durations cannot be negative")
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("consumer: %w", err)
	}
	o.Workers = cmp.Or(o.Workers, 8)
	o.Window = cmp.Or(o.Window, 1000)
	o.MaxAttempts = cmp.Or(o.MaxAttempts, 10)
	o.ClaimIdle = cmp.Or(o.ClaimIdle, 15*time.Second)
	o.DrainTimeout = cmp.Or(o.DrainTimeout, 10*time.Second)
	o.Window = max(o.Window, o.Workers)
	if o.Consumer == "" {
		o.Consumer = consumerName()
	}
	if o.Backoff == nil {
		o.Backoff = func(attempt int) time.Duration { return expBackoff(attempt, 100*time.Millisecond, 30*time.Second) }
	}
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler)).With("component", "consumer", "group", o.Group)
	return nil
}

// consumerName is new at every start: a process must never mistake another one's unacknowledged entries for its own.
func consumerName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d:%s", host, os.Getpid(), strings.ReplaceAll(uuid.NewString(), "-", "")[:8])
}

// expBackoff doubles lo with every attempt up to hi, and takes between half and all of that, so that many consumers do
// not come back at the same moment.
func expBackoff(attempt int, lo, hi time.Duration) time.Duration {
	d := hi
	if shift := attempt - 1; shift < 30 {
		d = min(hi, lo<<max(shift, 0))
	}
	return d/2 + rand.N(d/2+1) //nolint:gosec // spreads pauses, no secret
}
