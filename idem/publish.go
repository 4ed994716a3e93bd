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

// sendBatch sends the waiting publications in one exchange.
func (g *Guard) sendBatch(n *node) {
	batch := n.publications.Take()
	if len(batch) == 0 {
		return
	}
	ctx, start := batch[0].ctx, time.Now()
	cmds := make([]*redis.Cmd, len(batch))
	_, err := call(ctx, n, g.timeout, func(ctx context.Context) (any, error) {
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
	took := time.Since(start).Seconds()
	for i, p := range batch {
		switch {
		case errors.Is(err, errUnusable):
			p.err = err
		case redis.HasErrorPrefix(cmds[i].Err(), "NOSCRIPT"):
			p.reply, p.err = g.eval(ctx, scriptPublish, p.key, p.args...) // which observes its own time
		default:
			g.metrics.scripts.WithLabelValues(scriptPublish).Observe(took)
			if p.err = cmds[i].Err(); p.err != nil {
				p.err = fmt.Errorf("run script %s: %w", scriptPublish, p.err)
			} else {
				p.reply, p.err = replyOf(cmds[i])
			}
		}
		close(p.done)
	}
}
