package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
	"posthaste/internal/redisurl"
)

// discoverEvery is the interval of the search for new streams, which must be found within 5 s.
const discoverEvery = 2 * time.Second

// deadPrefix begins the name of every dead stream.
const deadPrefix = "dead."

// streams is the growing list of the streams to read.
type streams struct {
	mu      sync.Mutex
	names   []string
	changed bell
}

func newStreams(names []string) *streams {
	return &streams{names: slices.Compact(slices.Sorted(slices.Values(names)))}
}

// list returns the names, ascending. The slice is never changed.
func (s *streams) list() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names
}

// watch is list, and a channel that is closed when there are more.
func (s *streams) watch() ([]string, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names, s.changed.wait()
}

func (s *streams) add(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, found := slices.BinarySearch(s.names, name)
	if found {
		return false
	}
	s.names = slices.Insert(slices.Clone(s.names), i, name)
	s.changed.ring()
	return true
}

// discover looks for streams until ctx ends. It pauses for ten times the duration of a search, to protect a server with
// very many keys. Of the last two durations the shorter counts, because a slow one may be accidental.
func (c *Consumer) discover(ctx context.Context) {
	look := c.shards
	if c.opt.Prefix != "" {
		look = c.scan
	}
	var last time.Duration
	for ctx.Err() == nil {
		began := time.Now()
		err := look(ctx, func(name string) {
			if c.streams.add(name) {
				c.log.Info("stream found", "stream", name)
			}
		})
		if ctx.Err() != nil {
			return
		}
		c.dog.answered("", err, time.Now())
		if n := c.outages.note("discover", "", err); n > 0 {
			pause.For(ctx, reconnect(n))
			continue
		}
		took := time.Since(began)
		pause.For(ctx, max(discoverEvery, 10*min(took, last)))
		last = took
	}
}

// scan looks for streams with the prefix.
func (c *Consumer) scan(ctx context.Context, found func(name string)) error {
	return scanStreams(ctx, c.client, []string{c.opt.Prefix}, func(name string) {
		if !strings.HasPrefix(name, deadPrefix) || strings.HasPrefix(c.opt.Prefix, deadPrefix) {
			found(name)
		}
	})
}

// shards checks whether a relay has spread the types of the named streams over several, and which of these exist. A
// type may have the name of a stream of another type, so only the relay's mark distinguishes them.
func (c *Consumer) shards(ctx context.Context, found func(name string)) error {
	marked, err := exist(ctx, c.client, c.opt.Streams, shardedSuffix)
	if len(marked) == 0 {
		return err
	}
	var names []string
	for _, base := range marked {
		for n := range maxShards {
			names = append(names, base+"."+strconv.Itoa(n))
		}
	}
	there, unknown := exist(ctx, c.client, names, "")
	for _, name := range there {
		found(name)
	}
	return errors.Join(err, unknown)
}

// How a relay names the streams of a type that has several; see package sink.
const (
	shardedSuffix = "#sharded"
	maxShards     = 16
)

// Bases returns, for the streams that a relay has spread a type over, their names without the number, which is the name
// of the type's only stream before. It omits other streams. Only the relay's mark counts, not the form of a name. If a
// node of a cluster fails, it returns the error and the other nodes' results.
func Bases(ctx context.Context, client redis.UniversalClient, streams []string) (map[string]string, error) {
	of := map[string][]string{}
	for _, name := range streams {
		i := strings.LastIndexByte(name, '.')
		if n, err := strconv.Atoi(name[i+1:]); i > 0 && err == nil && n < maxShards && name[i+1:] == strconv.Itoa(n) {
			of[name[:i]] = append(of[name[:i]], name)
		}
	}
	bases := map[string]string{}
	if len(of) == 0 {
		return bases, nil
	}
	marked, err := exist(ctx, client, slices.Sorted(maps.Keys(of)), shardedSuffix)
	if err != nil {
		err = fmt.Errorf("look which streams are of one type: %w", err)
	}
	for _, base := range marked {
		for _, name := range of[base] {
			bases[name] = base
		}
	}
	return bases, err
}

// exist returns the names that exist as keys with suffix; if a node of a cluster fails, the error and those of the
// other nodes.
func exist(ctx context.Context, client redis.UniversalClient, names []string, suffix string) ([]string, error) {
	pipe := client.Pipeline()
	cmds := make([]*redis.IntCmd, len(names))
	for i, name := range names {
		cmds[i] = pipe.Exists(ctx, name+suffix)
	}
	_, err := pipe.Exec(ctx)
	var there []string
	for i, name := range names {
		if cmds[i].Val() > 0 {
			there = append(there, name)
		}
	}
	return there, err
}

// Streams lists the streams whose name begins with prefix, and their dead streams, ascending. If a node of a cluster
// fails, it returns the error and the other nodes' streams.
func Streams(ctx context.Context, client redis.UniversalClient, prefix string) ([]string, error) {
	return listStreams(ctx, client, append(deadPrefixes(prefix), prefix), "streams")
}

// listStreams is Streams for several prefixes; what names them in an error.
func listStreams(ctx context.Context, client redis.UniversalClient, prefixes []string, what string) ([]string, error) {
	var names []string
	err := scanStreams(ctx, client, prefixes, func(name string) { names = append(names, name) })
	if err != nil {
		err = fmt.Errorf("look for %s: %w", what, err)
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

// deadPrefixes are what the names of the dead streams begin with whose streams have prefix.
func deadPrefixes(prefix string) []string {
	return []string{deadPrefix + prefix, deadPrefix + "{" + prefix}
}

// scanStreams calls found for every stream whose name begins with one of the prefixes; in a cluster possibly more than
// once, and also for what the others have if a node does not answer. Gates and leases are no streams.
func scanStreams(ctx context.Context, client redis.UniversalClient, prefixes []string, found func(name string)) error {
	nodes, err := redisurl.Primaries(ctx, client)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	return redisurl.Each(ctx, nodes, func(ctx context.Context, n redisurl.Node) error {
		for _, prefix := range prefixes {
			it := n.Client.ScanType(ctx, 0, globQuote(prefix)+"*", 1000, "stream").Iterator()
			for it.Next(ctx) {
				mu.Lock()
				found(it.Val())
				mu.Unlock()
			}
			if err := it.Err(); err != nil {
				return err
			}
		}
		return nil
	})
}

// globQuote takes the special meaning from the characters of a Redis pattern.
func globQuote(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `^`, `\^`).Replace(s)
}

// bell wakes all goroutines that wait for a change. A channel with room for one signal would only wake one, which may
// not be concerned by the change, while another waits forever. It is guarded by the lock of the changed state. A
// goroutine gets the channel while it holds the lock under which it decides to wait, so it misses no change.
type bell struct{ ch chan struct{} }

// wait returns a channel that is closed at the next ring. The caller holds the lock.
func (b *bell) wait() <-chan struct{} {
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

// ring wakes all waiters. The caller holds the lock.
func (b *bell) ring() {
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
