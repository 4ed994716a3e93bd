package sink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Durability is what the barrier before the deletion of rows waits for. The zero value waits for nothing.
type Durability struct {
	// Replicas is how many replicas must have received the entries.
	Replicas int
	// AOF asks for the server's own append-only file to be synced.
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

// DurabilityError means that the barrier was not reached in time. It passes: nothing was deleted, ask again.
type DurabilityError struct {
	// Want is the durability asked for.
	Want Durability
	// Got is how many replicas, or local files, had everything.
	Got int64
}

func (e *DurabilityError) Error() string {
	return fmt.Sprintf("durability %s not reached: %d acknowledged in time", e.Want, e.Got)
}

// The barrier waits until the context's deadline less the time the answer needs (Redis looks for expired waits ten
// times a second), and this long without a deadline.
const (
	barrierWait   = 5 * time.Second
	barrierMargin = 150 * time.Millisecond
)

// Confirm implements outbox.Sink.
func (s *Sink) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	write := "1"
	if s.durable.none() {
		write = "0"
	}
	calls := callsByStream(marks, func(stream string) []any { return append(s.gateArgs(stream, o), write) })
	if s.durable.none() {
		return s.verdicts("confirm", calls, runAll(ctx, s.client, confirmScript, calls))
	}
	nodes, err := s.byNode(ctx, calls)
	if err != nil {
		return s.failed("confirm", calls[0].stream, err)
	}
	for node, calls := range nodes {
		if err := s.barrier(ctx, node, calls); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sink) byNode(ctx context.Context, calls []streamCall) (map[*redis.Client][]streamCall, error) {
	nodes := make(map[*redis.Client][]streamCall)
	for _, c := range calls {
		node, err := s.node(ctx, c.stream)
		if err != nil {
			return nil, err
		}
		nodes[node] = append(nodes[node], c)
	}
	return nodes, nil
}

// barrier writes to the gates and waits, on one connection: WAIT and WAITAOF know only of their own connection's
// writes.
func (s *Sink) barrier(ctx context.Context, node *redis.Client, calls []streamCall) error {
	conn := node.Conn()
	defer func() { _ = conn.Close() }()
	if err := s.verdicts("confirm", calls, runAll(ctx, conn, confirmScript, calls)); err != nil {
		return err
	}
	got, want, err := s.wait(ctx, conn)
	if err == nil && got < want {
		err = &DurabilityError{Want: s.durable, Got: got}
	}
	return s.failed("confirm", calls[0].stream, err)
}

func (s *Sink) wait(ctx context.Context, conn *redis.Conn) (got, want int64, err error) {
	// 0 would mean forever.
	t := max(remaining(ctx, barrierWait)-barrierMargin, time.Millisecond)
	if !s.durable.AOF {
		got, err = conn.Wait(ctx, s.durable.Replicas, t).Result()
		return got, int64(s.durable.Replicas), err
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
