package idem

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// publisher batches the results of finished operations. Only a result's own request waits for its publication, after
// the reply. Results that arrive during an exchange share the next one, which under load saves most exchanges.
type publisher struct {
	mu    sync.Mutex
	busy  bool
	queue []*publication
}

type publication struct {
	key  Key
	args []any
	// turn is closed when its request must send the queue, done when the publication was sent.
	turn, done chan struct{}
	reply      []string
	err        error
}

// publish writes a finished record; it returns the script's reply. It is bounded by two call timeouts.
func (g *Guard) publish(ctx context.Context, key Key, args ...any) ([]string, error) {
	n, err := g.nodeOf(ctx, key)
	if err != nil {
		return nil, err
	}
	pb := &n.publisher
	p := &publication{key: key, args: args, turn: make(chan struct{}), done: make(chan struct{})}
	pb.mu.Lock()
	pb.queue = append(pb.queue, p)
	if !pb.busy {
		pb.busy = true
		close(p.turn)
	}
	pb.mu.Unlock()
	select {
	case <-p.done:
	case <-p.turn:
		g.sendQueue(ctx, n)
	}
	return p.reply, p.err
}

// sendQueue sends the queue, and gives the next turn to the first publication that arrived since.
func (g *Guard) sendQueue(ctx context.Context, n *node) {
	pb := &n.publisher
	pb.mu.Lock()
	batch := pb.queue
	pb.queue = nil
	pb.mu.Unlock()
	defer func() {
		pb.mu.Lock()
		defer pb.mu.Unlock()
		if pb.busy = len(pb.queue) > 0; pb.busy {
			close(pb.queue[0].turn)
		}
	}()
	if len(batch) > 1 {
		g.sendBatch(ctx, n, batch)
	} else {
		p := batch[0]
		p.reply, p.err = g.eval(ctx, scriptPublish, p.key, p.args...)
	}
	for _, p := range batch {
		close(p.done)
	}
}

// sendBatch sends several publications in one exchange.
func (g *Guard) sendBatch(ctx context.Context, n *node, batch []*publication) {
	start := time.Now()
	cmds := make([]*redis.Cmd, len(batch))
	_, err := n.call(ctx, g.timeout, func(ctx context.Context) (any, error) {
		_, err := g.client.Pipelined(ctx, func(pipe redis.Pipeliner) error {
			for i, p := range batch {
				cmds[i] = g.scripts[scriptPublish].EvalSha(ctx, pipe, []string{p.key.String()}, p.args...)
			}
			return nil
		})
		if redis.HasErrorPrefix(err, "NOSCRIPT") {
			err = nil // healed below
		}
		return nil, err
	})
	for i, p := range batch {
		g.metrics.scripts.WithLabelValues(scriptPublish).Observe(time.Since(start).Seconds())
		switch {
		case errors.Is(err, errUnusable):
			p.err = err
		case redis.HasErrorPrefix(cmds[i].Err(), "NOSCRIPT"):
			p.reply, p.err = g.eval(ctx, scriptPublish, p.key, p.args...)
		case cmds[i].Err() != nil:
			p.err = fmt.Errorf("run script %s: %w", scriptPublish, cmds[i].Err())
		default:
			p.reply, p.err = replyStrings(cmds[i].Val())
		}
	}
}
