package sink

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"posthaste/outbox"
)

// maxGroups bounds the groups of a stream that have series of their own.
const maxGroups = 50

// observations record which series exist and how much each group is known to have missed.
type observations struct {
	mu      sync.Mutex
	streams map[string]map[string]loss
	// servers are the run ids of the last observed Redis, or of the masters of the cluster.
	servers []string
}

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
	s.seen.mu.Lock()
	defer s.seen.mu.Unlock()
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
	same := slices.Equal(s.seen.servers, runs)
	s.seen.servers = runs
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{1, stream, maxGroups, maxConsumers}}
	}
	cmds := runAll(ctx, s.client, observeScript, calls)
	before := s.seen.streams
	s.seen.streams = make(map[string]map[string]loss, len(streams))
	for i, stream := range streams {
		reply, err := cmds[i].Slice()
		if notAStream(err) {
			continue
		}
		if err != nil {
			s.seen.streams[stream] = before[stream] // the state is unknown, so the series stay
			if first == nil {
				first = fmt.Errorf("observe stream %q: %w", stream, err)
			}
			continue
		}
		s.seen.streams[stream] = s.observeStream(stream, reply, before[stream], same)
	}
	for stream, groups := range before {
		s.forget(stream, groups)
	}
	return first
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
		if unsafeEviction(info["maxmemory_policy"]) {
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
	s.m.length.WithLabelValues(stream).Set(float64(length))
	lost := make(map[string]loss)
	for _, g := range parseGroups(stream, reply) {
		name := strings.ToValidUTF8(g.Name, "?")
		labels := []string{stream, name}
		s.m.pending.WithLabelValues(labels...).Set(float64(g.Pending))
		s.m.lag.WithLabelValues(labels...).Set(float64(g.Lag))
		s.m.oldest.WithLabelValues(labels...).Set(g.OldestPending.Seconds())
		s.m.idle.WithLabelValues(labels...).Set(g.Idle.Seconds())
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
		s.m.trimLost.WithLabelValues(labels...).Add(float64(now.missed - was.missed))
		lost[name] = now
	}
	return lost
}

// neverRead is the position of a group that begins at the first entry and has read nothing.
const neverRead = "0-0"

func (s *Sink) forget(stream string, groups map[string]loss) {
	now, ok := s.seen.streams[stream]
	if !ok {
		s.m.length.DeleteLabelValues(stream)
	}
	for group := range groups {
		if _, still := now[group]; still {
			continue
		}
		for _, v := range s.m.gaugesOfGroups() {
			v.DeleteLabelValues(stream, group)
		}
		s.m.trimLost.DeleteLabelValues(stream, group)
	}
}

// Unobserve deletes the series of Observe, because another instance exports them from now on. The counters of missed
// entries stay.
func (s *Sink) Unobserve() {
	s.seen.mu.Lock()
	defer s.seen.mu.Unlock()
	for stream, groups := range s.seen.streams {
		s.m.length.DeleteLabelValues(stream)
		for group := range groups {
			for _, v := range s.m.gaugesOfGroups() {
				v.DeleteLabelValues(stream, group)
			}
		}
	}
	s.m.memory.Set(0)
	s.m.eviction.Set(0)
}

func lessID(a, b string) bool { return outbox.CompareIDs(a, b) < 0 }
