package sink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Server keeps a client with one process of Redis. A process that was restarted, another one that took over, or a
// dataset that was put in its place may lack what the last one had acknowledged; so nothing is published there before
// the relay has looked. One look for each connection is what that costs.
//
// A process is known by its run id, and by the id of its replication history, which changes with a promotion.
type Server struct {
	mu sync.Mutex
	// bound is the process that is met; the zero one until the first one is, after which every other one is refused.
	bound instance
	any   bool // meet whoever answers
}

// instance is a running Redis and the history of its data. The zero one cannot be known.
type instance struct {
	run, history string
	// fresh is set in a primary whose history is not the continuation of another one, as a promoted replica's is. It
	// may begin anew, with the first replica or some time after the last one has gone, without anything having happened
	// to the data.
	fresh bool
}

// String is what the process is remembered by; "" if it cannot be known.
func (p instance) String() string {
	if p.run == "" {
		return ""
	}
	return p.run + "/" + p.history
}

// errOther refuses a connection.
var errOther = errors.New("this is another process of Redis, or it was restarted")

// onConnect looks at each new connection.
func (s *Server) onConnect(ctx context.Context, cn *redis.Conn) error {
	id, err := identify(ctx, cn)
	if err != nil {
		return err
	}
	return s.meet(id)
}

// meet takes the first process, and refuses any other.
func (s *Server) meet(p instance) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.any || s.bound == p:
		return nil
	case s.bound == instance{}, s.bound.run == p.run && s.bound.fresh && p.fresh:
		s.bound = p
		return nil
	}
	return errOther
}

// identify asks who answers; the zero process if the user may not know, or it is something in between that does not
// say.
func identify(ctx context.Context, c interface{ Pipeline() redis.Pipeliner }) (instance, error) {
	pipe := c.Pipeline()
	server, replication := pipe.Info(ctx, "server"), pipe.Info(ctx, "replication")
	_, _ = pipe.Exec(ctx)
	for _, cmd := range []*redis.StringCmd{server, replication} {
		if err := cmd.Err(); redis.HasErrorPrefix(err, "NOPERM") || redis.HasErrorPrefix(err, "unknown command") {
			return instance{}, nil
		} else if err != nil {
			return instance{}, err
		}
	}
	p := instance{run: infoField(server.Val(), "run_id"), history: infoField(replication.Val(), "master_replid")}
	if p.run == "" {
		return instance{}, nil
	}
	p.fresh = infoField(replication.Val(), "role") == "master" &&
		strings.Trim(infoField(replication.Val(), "master_replid2"), "0") == ""
	return p, nil
}

// infoField takes a field out of what INFO answers.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// NewBoundClient returns a client with the options of o and of Configure that is to stay with one process of Redis.
func NewBoundClient(o *redis.Options) (*redis.Client, *Server) {
	Configure(o)
	s := &Server{any: true}
	o.OnConnect = s.onConnect
	return redis.NewClient(o), s
}

// Bind implements outbox.Sink.
func (s *Sink) Bind(ctx context.Context) (string, error) {
	if s.server == nil {
		one, ok := s.client.(*redis.Client)
		if !ok {
			return "", nil // many servers are no one in particular
		}
		p, err := identify(ctx, one)
		return p.String(), s.failed("identify", "", err)
	}
	// Whoever answers first is it.
	s.server.mu.Lock()
	s.server.bound, s.server.any = instance{}, false
	s.server.mu.Unlock()
	p, err := identify(ctx, s.client)
	if err == nil {
		err = s.server.meet(p)
	}
	s.moved.Store(false)
	return p.String(), s.failed("identify", "", err)
}

// Release implements outbox.Sink.
func (s *Sink) Release() {
	if s.server != nil {
		s.server.mu.Lock()
		s.server.any = true
		s.server.mu.Unlock()
	}
	s.moved.Store(false)
}

// stays notices a server that has changed under its connections: one that was made a replica, and primary again.
func (s *Sink) stays(ctx context.Context) error {
	if s.server == nil {
		return nil
	}
	p, err := identify(ctx, s.client)
	if err == nil && s.server.meet(p) != nil {
		s.moved.Store(true)
	}
	return err
}

// Look implements outbox.Sink.
func (s *Sink) Look(ctx context.Context, source uuid.UUID, streams []string) ([]outbox.StreamState, error) {
	calls := make([]streamCall, len(streams))
	for i, stream := range streams {
		calls[i] = streamCall{stream: stream, args: []any{2, stream, gateKey(stream), source.String(), s.name()}}
	}
	cmds := runAll(ctx, s.client, lookScript, calls)
	out := make([]outbox.StreamState, len(streams))
	for i, stream := range streams {
		reply, err := cmds[i].Slice()
		if err == nil && len(reply) != 8 {
			err = fmt.Errorf("unexpected reply to the look script")
		}
		if err != nil {
			return nil, s.failed("look at", stream, err)
		}
		out[i] = outbox.StreamState{
			Stream: stream, Gate: number(reply, 0) == 1, Now: time.UnixMilli(number(reply, 2)), Last: text(reply, 3),
			Forgot: number(reply, 4) == 1, Behind: number(reply, 5) == 1,
			Missing: max(s.memory(stream).Load()-number(reply, 1), 0), Source: text(reply, 6),
		}
		epoch, rest, _ := strings.Cut(text(reply, 7), "|")
		out[i].Epoch, _ = strconv.ParseInt(epoch, 10, 64) // without an owner it is 0
		out[i].Nonce, _, _ = strings.Cut(rest, "|")
		if number(reply, 5) == unsure && out[i].Gate && !out[i].Forgot {
			if out[i].Behind, err = s.behind(ctx, stream, out[i].Last); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}
