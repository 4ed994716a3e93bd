package consumer

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

const (
	// ackLinger is how long a lone acknowledgement waits for company: one call for many costs Redis, and us, far less.
	ackLinger = time.Millisecond
	// ackEnough is how many go at once.
	ackEnough = 128
	// ackMax bounds one call.
	ackMax = 2000
)

// acknowledge takes what the workers have put into acks, in turn, until closing is closed and nothing is left, or ctx
// ends. The entries of one stream go in one command, so that no acknowledgement of a subject overtakes an earlier one.
func (c *Consumer) acknowledge(ctx context.Context, closing <-chan struct{}) {
	for {
		var first *entry
		select {
		case first = <-c.acks:
		case <-ctx.Done():
			return
		case <-closing:
			if len(c.acks) == 0 {
				return
			}
			first = <-c.acks
		}
		es := c.together(ctx, closing, []*entry{first})
		for c.flush(ctx, es) != nil {
			if ctx.Err() != nil {
				return
			}
		}
	}
}

// together adds more acknowledgements to es, for which it waits a moment if they are few.
func (c *Consumer) together(ctx context.Context, closing <-chan struct{}, es []*entry) []*entry {
	linger := time.NewTimer(ackLinger)
	defer linger.Stop()
	for waited := false; !waited && len(es) < ackEnough; {
		select {
		case e := <-c.acks:
			es = append(es, e)
		case <-linger.C:
			waited = true
		case <-closing:
			waited = true
		case <-ctx.Done():
			waited = true
		}
	}
	for len(es) < ackMax {
		select {
		case e := <-c.acks:
			es = append(es, e)
		default:
			return es
		}
	}
	return es
}

// flush acknowledges es, in one round trip. An error means that some may not be; all are tried again, which is
// harmless.
func (c *Consumer) flush(ctx context.Context, es []*entry) error {
	args := map[string][]any{}
	for _, e := range es {
		if args[e.stream] == nil {
			args[e.stream] = []any{"xack", e.stream, c.opt.Group}
		}
		args[e.stream] = append(args[e.stream], e.id)
	}
	cmds, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, a := range args {
			p.Do(ctx, a...)
		}
		return nil
	})
	// A connection that the server refuses is an error of the pipeline and of none of its commands.
	for _, cmd := range cmds {
		e := cmd.Err()
		if e == nil {
			continue
		}
		err = e
		if !strings.HasPrefix(e.Error(), "WRONGTYPE") {
			break
		}
		// A key of another type stands in place of the stream: nothing is pending there any more, and holding on to the
		// acknowledgement would stop all others.
		err = nil
	}
	if n := c.outages.note("ack", "", err); n > 0 {
		pause.For(ctx, reconnect(n))
		return err
	}
	c.queues.acked(es)
	for _, e := range es {
		if e.suspect {
			c.suspect.leave(e)
		}
	}
	return nil
}
