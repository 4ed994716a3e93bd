package idem

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// publication is the result of a finished operation. Only a result's own request waits for its publication, after the
// reply. Results that arrive during an exchange share the next one, which under load saves most exchanges.
type publication struct {
	ctx   context.Context // of its request
	key   Key
	args  []any
	done  chan struct{}
	reply []string
	err   error
}

// publish writes a finished record; it returns the script's reply. It is bounded by two call timeouts.
func (g *Guard) publish(ctx context.Context, key Key, args ...any) ([]string, error) {
	n, err := g.nodeOf(ctx, key)
	if err != nil {
		return nil, err
	}
	p := &publication{ctx: ctx, key: key, args: args, done: make(chan struct{})}
	n.publications.Do(context.Background(), p, p.done)
	return p.reply, p.err
}

// sendQueue sends the waiting publications.
func (g *Guard) sendQueue(n *node) {
	batch := n.publications.Take()
	switch len(batch) {
	case 0:
	case 1:
		p := batch[0]
		p.reply, p.err = g.eval(p.ctx, scriptPublish, p.key, p.args...)
	default:
		g.sendBatch(batch[0].ctx, n, batch)
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
