package sink

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"posthaste/outbox"
	"posthaste/sink/metrics"
)

// loss is how much a group has missed.
type loss struct {
	missed int64
	// goneBefore is how many entries had left the stream before the group was first observed.
	goneBefore int64
	// excess is by how much Redis' count of read entries is too small. That count does not survive a restart or a
	// failover: the group then has its position and an old count.
	excess int64
}

// Observe reads the state of streams and their consumer groups into the metrics, with one call per stream. It deletes
// the series of groups that no longer exist and of streams that are not in streams.
func (s *Sink) Observe(ctx context.Context, streams []string) error {
	s.observing.Lock()
	defer s.observing.Unlock()
	infos, first := s.infos(ctx, "server", "memory")
	if len(infos) == 0 {
		return fmt.Errorf("observe: %w", first)
	}
	s.observeMemory(infos)
	var runs []string
	for _, info := range infos {
		if !s.varies() {
			runs = append(runs, info["run_id"])
		}
	}
	slices.Sort(runs)
	same := slices.Equal(s.observed, runs)
	s.observed = runs
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, metrics.MaxGroups, maxConsumers}}
	}
	cmds := runAll(ctx, s.o.Client, observeScript, calls)
	err := s.m.Observe(streams, func(i int, before map[string]loss) (int64, map[string]loss, error) {
		reply, err := cmds[i].Slice()
		if notAStream(err) {
			return 0, nil, nil
		}
		if err != nil {
			return 0, nil, fmt.Errorf("observe stream %q: %w", streams[i], err)
		}
		return number(reply, 0), s.observeStream(streams[i], reply, before, same), nil
	})
	return cmp.Or(first, err)
}

// observeMemory exports the memory of the server with the least room, and whether a server may evict keys.
func (s *Sink) observeMemory(infos map[string]map[string]string) {
	ratio, unsafe := 0.0, 0.0
	for _, info := range infos {
		used, _ := strconv.ParseFloat(info["used_memory"], 64)
		limit, _ := strconv.ParseFloat(info["maxmemory"], 64)
		if limit > 0 {
			ratio = max(ratio, used/limit)
		}
		if policy := info["maxmemory_policy"]; policy != "" && policy != "noeviction" {
			unsafe = 1
		}
	}
	s.m.memory.Set(ratio)
	s.m.eviction.Set(unsafe)
}

// observeStream evaluates the answer of observe.lua and returns how much each group has missed. same reports that the
// answer is from the server that was observed before.
func (s *Sink) observeStream(stream string, reply []any, before map[string]loss, same bool) map[string]loss {
	length, added := number(reply, 0), number(reply, 1)
	lost := make(map[string]loss)
	for _, g := range parseGroups(stream, reply) {
		name := strings.ToValidUTF8(g.Name, "?")
		was, known := before[name]
		now := was
		if !known {
			now.goneBefore = max(added-length, 0)
		}
		missed := g.Lost
		if missed < 0 && g.Floor == neverRead && added >= 0 {
			// Redis counts for a group from its first read on, but entries that leave the stream before it are missed
			// as well.
			missed = added - length - now.goneBefore
		}
		if known && !same {
			now.excess = max(missed-was.missed, 0)
		}
		now.missed = max(missed-now.excess, was.missed)
		s.m.Group(stream, metrics.Group{
			Name: name, Pending: g.Pending, Lag: g.Lag, Oldest: g.OldestPending, Idle: g.Idle,
		})
		s.m.Lost(stream, name, now.missed-was.missed)
		lost[name] = now
	}
	return lost
}

// neverRead is before every entry: the position of a group that begins at the first one and has read nothing.
const neverRead = "0-0"

// Unobserve deletes the series of Observe, because another instance exports them from now on.
func (s *Sink) Unobserve() {
	s.m.Unobserve()
	s.m.memory.Set(0)
	s.m.eviction.Set(0)
}

func lessID(a, b string) bool { return outbox.CompareIDs(a, b) < 0 }

// redisMetrics are the metrics of a sink, and those that only Redis has.
type redisMetrics struct {
	*metrics.Sink[loss]

	pubsub           prometheus.Counter
	memory, eviction prometheus.Gauge
}

// newMetrics makes the metrics and registers them. A nil registerer leaves them unregistered.
func newMetrics(reg prometheus.Registerer) *redisMetrics {
	f := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	return &redisMetrics{
		Sink: metrics.New[loss](reg, classes),
		pubsub: f.NewCounter(prometheus.CounterOpts{
			Name: "outbox_pubsub_failed_total",
			Help: "Events that are in their stream and were not published on their channel. Rises when Redis refuses " +
				"PUBLISH, and with types that begin with __, whose channels are Redis' own.",
		}),
		memory: gauge("redis_memory_ratio",
			"Redis memory in use, relative to maxmemory; 0 without a limit. At 1 publishing stops."),
		eviction: gauge("redis_eviction_unsafe",
			"1 if maxmemory-policy is not noeviction, so that Redis may delete streams and gates."),
	}
}
