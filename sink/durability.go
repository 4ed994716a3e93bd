package sink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
)

// Durability is what Confirm waits for before rows are settled. The zero value waits for nothing.
type Durability struct {
	// Replicas is how many replicas must have received the entries.
	Replicas int
	// AOF requires a sync of the server's own append-only file.
	AOF bool
}

// ParseDurability reads none, replicas=N or aof.
func ParseDurability(s string) (Durability, error) {
	switch {
	case s == "none":
		return Durability{}, nil
	case s == "aof":
		return Durability{AOF: true}, nil
	case strings.HasPrefix(s, "replicas="):
		n, err := strconv.Atoi(strings.TrimPrefix(s, "replicas="))
		if err == nil && n > 0 && n <= 100 {
			return Durability{Replicas: n}, nil
		}
	}
	return Durability{}, fmt.Errorf("durability %q is not none, replicas=N (1 to 100) or aof", s)
}

// String returns the form that ParseDurability reads.
func (d Durability) String() string {
	switch {
	case d.AOF:
		return "aof"
	case d.Replicas > 0:
		return "replicas=" + strconv.Itoa(d.Replicas)
	}
	return "none"
}

func (d Durability) none() bool { return d == Durability{} }

// DurabilityError means that the configured durability was not reached in time. Nothing was settled, and the caller may
// repeat the call.
type DurabilityError struct {
	Want Durability
	// Got is how many replicas, or local files, had everything.
	Got int64
}

func (e *DurabilityError) Error() string {
	return fmt.Sprintf("durability %s not reached: %d acknowledged in time", e.Want, e.Got)
}

// barrierWait bounds the wait on a context without a deadline. Otherwise the wait ends barrierMargin before the
// deadline, because Redis checks for expired waits ten times a second.
const (
	barrierWait   = 5 * time.Second
	barrierMargin = 150 * time.Millisecond
)

// Confirm implements stream.Sink.
func (s *Sink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	write := "1"
	if s.o.Durability.none() {
		write = "0"
	}
	calls := callsByStream(marks, func(stream string) []any { return append(gateArgs(stream, o), write) })
	if s.o.Durability.none() {
		return s.verdicts(stepConfirm, calls, runAll(ctx, s.o.Client, confirmScript, calls))
	}
	return s.barriers(ctx, calls)
}

// redirects bounds how often a call is redirected to another node of a cluster.
const redirects = 5

// barriers calls barrier for every node that holds one of the streams, and follows redirections.
func (s *Sink) barriers(ctx context.Context, calls []streamCall) error {
	places := make(map[place][]streamCall)
	for _, c := range calls {
		node, err := redisurl.Holder(ctx, s.o.Client, c.stream)
		if err != nil {
			return s.failed(stepConfirm, c.stream, err)
		}
		at := place{addr: node.Options().Addr}
		places[at] = append(places[at], c)
	}
	for range redirects {
		var mu sync.Mutex
		next := make(map[place][]streamCall)
		var group errgroup.Group
		for at, calls := range places {
			group.Go(func() error {
				led, err := s.barrier(ctx, at, calls)
				mu.Lock()
				defer mu.Unlock()
				for at, calls := range led {
					next[at] = append(next[at], calls...)
				}
				return err
			})
		}
		if err := group.Wait(); err != nil || len(next) == 0 {
			return err
		}
		places = next
		if many, ok := s.o.Client.(*redis.ClusterClient); ok {
			many.ReloadState(ctx)
		}
	}
	return s.failed(stepConfirm, calls[0].stream, errRedirects)
}

var errRedirects = errors.New("the nodes of the cluster do not agree on the master of the stream")

// place is where a call is made.
type place struct {
	addr string
	// asking is set for a node that is importing the slot and needs the command ASKING.
	asking bool
}

// barrier writes to the gates and waits on the same connection, because WAIT and WAITAOF only cover writes of their own
// connection. It returns the calls that were redirected to other nodes.
func (s *Sink) barrier(ctx context.Context, at place, calls []streamCall) (led map[place][]streamCall, err error) {
	node, done, err := s.nodeAt(ctx, at.addr, calls[0].stream)
	if err != nil {
		return nil, s.failed(stepConfirm, calls[0].stream, err)
	}
	defer done()
	conn := node.Conn()
	defer func() { _ = conn.Close() }()
	var cmds []*redis.Cmd
	if at.asking {
		for _, c := range calls {
			cmds = append(cmds, ask(ctx, conn, confirmScript, c))
		}
	} else {
		cmds = runAll(ctx, conn, confirmScript, calls)
	}
	led = make(map[place][]streamCall)
	var here []streamCall
	var replies []*redis.Cmd
	for i, c := range calls {
		if addr, moved := redis.IsMovedError(cmds[i].Err()); moved {
			led[place{addr: addr}] = append(led[place{addr: addr}], c)
		} else if addr, asked := redis.IsAskError(cmds[i].Err()); asked {
			led[place{addr, true}] = append(led[place{addr, true}], c)
		} else {
			here, replies = append(here, c), append(replies, cmds[i])
		}
	}
	if err := s.verdicts(stepConfirm, here, replies); err != nil || len(here) == 0 {
		return led, err
	}
	got, want, err := s.wait(ctx, conn)
	if err == nil && got < want {
		err = &DurabilityError{Want: s.o.Durability, Got: got}
	}
	return led, s.failed(stepConfirm, here[0].stream, err)
}

// ask calls a script on a node that is importing the slot of its stream.
func ask(ctx context.Context, conn *redis.Conn, sc *script, call streamCall) *redis.Cmd {
	var cmd *redis.Cmd
	for _, how := range [][]any{{sc.evalsha, sc.sha}, {sc.eval, sc.text}} {
		pipe := conn.Pipeline()
		pipe.Do(ctx, "asking")
		cmd = pipe.Do(ctx, append(how, call.args...)...)
		if _, err := pipe.Exec(ctx); err != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err)
		}
		if !redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") {
			break
		}
	}
	return cmd
}

// nodeAt returns the node at addr and a function that releases it. stream is a stream of the call.
func (s *Sink) nodeAt(ctx context.Context, addr, stream string) (node *redis.Client, done func(), err error) {
	some, err := redisurl.Holder(ctx, s.o.Client, stream)
	if err != nil || some.Options().Addr == addr {
		return some, func() {}, err
	}
	node = s.another(some, addr)
	return node, func() { _ = node.Close() }, nil
}

func (s *Sink) wait(ctx context.Context, conn *redis.Conn) (got, want int64, err error) {
	// A timeout of 0 would mean no limit.
	t := max(remaining(ctx, barrierWait)-barrierMargin, time.Millisecond)
	if !s.o.Durability.AOF {
		got, err = conn.Wait(ctx, s.o.Durability.Replicas, t).Result()
		return got, int64(s.o.Durability.Replicas), err
	}
	counts, err := conn.WaitAOF(ctx, 1, 0, t).Result()
	if err == nil && len(counts) != 2 {
		err = errors.New("WAITAOF gave an unknown answer")
	}
	if err != nil {
		return 0, 1, err
	}
	return counts[0], 1, nil
}
