package sink

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxGroups bounds the groups of a stream that get series of their own.
const maxGroups = 50

// observations remember what has series, and how much every group was known to have missed.
type observations struct {
	mu      sync.Mutex
	streams map[string]map[string]int64
}

// Observe reads the state of streams and their consumer groups into the metrics, with one call per stream. Series of
// streams no longer named and of groups that are gone disappear.
func (s *Sink) Observe(ctx context.Context, streams []string) error {
	s.seen.mu.Lock()
	defer s.seen.mu.Unlock()
	info, err := s.info(ctx, "memory")
	if err != nil {
		return fmt.Errorf("observe: %w", err)
	}
	s.observeMemory(info)
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, maxGroups}}
	}
	cmds := runAll(ctx, s.client, observeScript, calls)
	before := s.seen.streams
	s.seen.streams = make(map[string]map[string]int64, len(streams))
	var first error
	for i, stream := range streams {
		reply, err := cmds[i].Slice()
		if err != nil {
			s.seen.streams[stream] = before[stream] // unknown is not gone
			if first == nil {
				first = fmt.Errorf("observe stream %q: %w", stream, err)
			}
			continue
		}
		s.seen.streams[stream] = s.observeStream(stream, reply, before[stream])
	}
	for stream, groups := range before {
		s.forget(stream, groups)
	}
	return first
}

func (s *Sink) observeMemory(info map[string]string) {
	used, _ := strconv.ParseFloat(info["used_memory"], 64)
	limit, _ := strconv.ParseFloat(info["maxmemory"], 64)
	ratio := 0.0
	if limit > 0 {
		ratio = used / limit
	}
	s.m.memory.Set(ratio)
	unsafe := 0.0
	if unsafeEviction(info["maxmemory_policy"]) {
		unsafe = 1
	}
	s.m.eviction.Set(unsafe)
}

// observeStream takes the answer of observe.lua and returns how much each group has missed.
func (s *Sink) observeStream(stream string, reply []any, before map[string]int64) map[string]int64 {
	length, added := number(reply, 0), number(reply, 1)
	firstEntry := text(reply, 2)
	s.m.length.WithLabelValues(stream).Set(float64(length))
	missed := make(map[string]int64)
	for i := 3; i < len(reply); i++ {
		g, _ := reply[i].([]any)
		name := strings.ToValidUTF8(text(g, 0), "?")
		labels := []string{stream, name}
		pending, entriesRead := number(g, 1), number(g, 3)
		s.m.pending.WithLabelValues(labels...).Set(float64(pending))
		s.m.lag.WithLabelValues(labels...).Set(float64(number(g, 2)))
		s.m.oldest.WithLabelValues(labels...).Set(age(text(g, 6), text(g, 5)))
		lost := s.m.trimLost.WithLabelValues(labels...)
		// What has left the stream at its head is what was added less what is there; what the group has not read of
		// that, it never will. Redis' own lag goes on counting those entries.
		was := before[name]
		missed[name] = was
		if added < 0 || entriesRead < 0 || firstEntry != "" && !lessID(text(g, 4), firstEntry) {
			continue
		}
		if n := added - length - entriesRead; n > was {
			lost.Add(float64(n - was))
			missed[name] = n
		}
	}
	return missed
}

// forget removes the series of what is gone.
func (s *Sink) forget(stream string, groups map[string]int64) {
	now, ok := s.seen.streams[stream]
	if !ok {
		s.m.length.DeleteLabelValues(stream)
	}
	for group := range groups {
		if _, still := now[group]; still {
			continue
		}
		for _, v := range []*prometheus.MetricVec{s.m.pending.MetricVec, s.m.lag.MetricVec, s.m.oldest.MetricVec, s.m.trimLost.MetricVec} {
			v.DeleteLabelValues(stream, group)
		}
	}
}

// age returns the seconds from an entry's id to now, a time in milliseconds; 0 without an entry.
func age(now, id string) float64 {
	ms, _, _ := strings.Cut(id, "-")
	then, err1 := strconv.ParseInt(ms, 10, 64)
	at, err2 := strconv.ParseInt(now, 10, 64)
	if err1 != nil || err2 != nil {
		return 0
	}
	return max(float64(at-then)/1000, 0)
}

// lessID compares entry ids.
func lessID(a, b string) bool {
	am, as := splitID(a)
	bm, bs := splitID(b)
	return am < bm || am == bm && as < bs
}

func splitID(id string) (ms, seq uint64) {
	m, q, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseUint(m, 10, 64)
	seq, _ = strconv.ParseUint(q, 10, 64)
	return ms, seq
}
