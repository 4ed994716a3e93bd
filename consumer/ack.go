package consumer

import (
	"context"
	"strings"
	"sync"
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
// ends. The entries of one stream go in one command, and one after the other, so that no acknowledgement of a subject
// overtakes an earlier one. In a cluster a node that does not answer holds up its own streams only.
func (c *Consumer) acknowledge(ctx context.Context, closing <-chan struct{}) {
	var wg sync.WaitGroup
	defer wg.Wait()
	waiting := map[string][]*entry{} // behind the call that is under way
	done := make(chan string)
	call := func(lane string, es []*entry) {
		waiting[lane] = es[min(len(es), ackMax):]
		wg.Go(func() {
			for c.flush(ctx, lane, es[:min(len(es), ackMax)]) != nil && ctx.Err() == nil {
			}
			select {
			case done <- lane:
			case <-ctx.Done():
			}
		})
	}
	for closed := closing; closed != nil || len(c.acks) > 0 || len(waiting) > 0; {
		select {
		case first := <-c.acks:
			for lane, es := range c.lanes(c.together(ctx, closing, []*entry{first})) {
				if behind, busy := waiting[lane]; busy {
					waiting[lane] = append(behind, es...)
				} else {
					call(lane, es)
				}
			}
		case lane := <-done:
			if behind := waiting[lane]; len(behind) > 0 {
				call(lane, behind)
			} else {
				delete(waiting, lane)
			}
		case <-ctx.Done():
			return
		case <-closed:
			closed = nil
		}
	}
}

// lanes returns the entries by what is acknowledged independently: streams in a cluster, otherwise all together.
func (c *Consumer) lanes(es []*entry) map[string][]*entry {
	if !c.cluster {
		return map[string][]*entry{"": es}
	}
	lanes := map[string][]*entry{}
	for _, e := range es {
		lanes[e.stream] = append(lanes[e.stream], e)
	}
	return lanes
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

// flush acknowledges es, which are a lane's, in one round trip. An error means that some may not be; all are tried
// again, which is harmless.
func (c *Consumer) flush(ctx context.Context, lane string, es []*entry) error {
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
	if n := c.outages.note("ack", lane, err); n > 0 {
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
