package credits

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

const (
	// lanes is how many pipelines of one node are under way at once: while one is carried out, the next is written.
	lanes = 2
	// waitLanes is the same when each has to wait for disks or replicas.
	waitLanes = 8
	// maxBatch is how many calls share a pipeline, maxQueued how many wait for one.
	maxBatch  = 256
	maxQueued = 20_000
)

// errNotSent means that a call gave up before it was sent.
var errNotSent = errors.New("the call was not sent")

// errNoReply means that a call has neither a reply nor an error.
var errNoReply = errors.New("the call has no reply")

// batcher lets calls that are made at the same time share pipelines. A call that finds nobody waiting is sent at once;
// while it is under way, others collect. Each call has its own reply, its own error and its own patience; what they
// share is the round trip, and the wait for durability behind their writes.
type batcher struct {
	client  redis.UniversalClient
	durable Durability
	// waits gets how long a pipeline took that waited for durability.
	waits prometheus.Observer

	mu    sync.Mutex
	nodes map[*redis.Client]*lane
}

func newBatcher(c redis.UniversalClient, d Durability, waits prometheus.Observer) *batcher {
	return &batcher{client: c, durable: d, waits: waits, nodes: map[*redis.Client]*lane{}}
}

// lane is what waits for one node. Its goroutines live while there is something to send.
type lane struct {
	node    *redis.Client
	durable Durability
	waits   prometheus.Observer

	mu      sync.Mutex
	queue   []*waitingCall
	running int
}

// waitingCall is one FCALL and what became of it, which is written before done is closed.
type waitingCall struct {
	cmd    *redis.StringSliceCmd
	waited error
	err    error
	done   chan struct{}
	since  time.Time
	// taken: it is being sent, or was. Guarded by the lane's mutex.
	taken bool
}

// call sends an FCALL that writes, with key among its keys, and waits until that is durable; waited is nil when it is.
// Errors: see nothingDone.
func (b *batcher) call(ctx context.Context, key string, fcall []any) (r []string, waited, err error) {
	l, err := b.lane(ctx, key)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: find the node: %w", errNotSent, err)
	}
	var loaded error
	for try := 0; ; try++ {
		r, waited, err = l.call(ctx, fcall)
		if functionMissing(err) && try == 0 {
			loaded = loadLibrary(ctx, b.client) // another node of a cluster may be down: the call tells
			continue
		}
		if functionMissing(err) {
			err = errors.Join(err, loaded)
		}
		if movedAway(err) && try == 0 {
			// The client that knows all nodes follows, and learns. That is one call at a time, but soon over.
			if cc, ok := b.client.(*redis.ClusterClient); ok {
				cc.ReloadState(ctx)
			}
			return b.alone(ctx, key, fcall)
		}
		if err != nil {
			err = fmt.Errorf("call %v: %w", fcall[1], err)
		}
		return r, waited, err
	}
}

// alone sends an FCALL by itself, and follows where the nodes of the cluster lead it.
func (b *batcher) alone(ctx context.Context, key string, fcall []any) (r []string, waited, err error) {
	if b.durable == (Durability{}) {
		cmd := redis.NewStringSliceCmd(ctx, fcall...)
		err = b.client.Process(ctx, once{cmd})
		return cmd.Val(), nil, err
	}
	c, err := primary(ctx, b.client, key)
	node, ok := c.(*redis.Client)
	if err == nil && !ok {
		err = fmt.Errorf("credits: a client of type %T cannot be used", c)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: find the node: %w", errNotSent, err)
	}
	asking := false
	for range followed {
		// The wait has no key, so the client that knows all nodes cannot send it along.
		p := node.Pipeline()
		if asking {
			p.Do(ctx, "asking")
		}
		cmd := redis.NewStringSliceCmd(ctx, fcall...)
		_ = p.Process(ctx, cmd)
		w := b.durable.wait(ctx, p)
		_, sent := p.Exec(ctx)
		r, waited, err = cmd.Val(), b.durable.reached(w), errorOf(cmd, sent)
		addr, moved := redis.IsMovedError(err)
		if !moved {
			if addr, asking = redis.IsAskError(err); !asking {
				break
			}
		}
		asking = !moved
		node = another(node, addr)
		defer node.Close()
	}
	return r, waited, err
}

// followed is how many nodes a call is sent to at most.
const followed = 4

// another returns a client of the node at addr, with the options of one of the others.
func another(node *redis.Client, addr string) *redis.Client {
	o := *node.Options()
	o.Addr, o.NodeAddress, o.MaxRetries = addr, "", -1 // which the client has made a zero, and that would mean three
	o.PoolSize, o.PipelinePoolSize = 1, -1
	return redis.NewClient(&o)
}

// once is a call that the client does not repeat by itself when a connection breaks: the error of the last attempt says
// nothing of those before it.
type once struct{ redis.Cmder }

// NoRetry is asked by the client.
func (once) NoRetry() bool { return true }

// errorOf is what became of a command of a pipeline, of which sent is the error. A server that refuses a new connection
// (password, number of clients) is an error of the pipeline alone: the client leaves its commands without reply and
// error.
func errorOf(cmd *redis.StringSliceCmd, sent error) error {
	switch {
	case cmd.Err() != nil || cmd.Val() != nil:
		return cmd.Err()
	case sent != nil:
		return sent
	}
	return errNoReply
}

// movedAway reports whether a node of a cluster refused a call because another one has its keys.
func movedAway(err error) bool {
	if err == nil {
		return false
	}
	return redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK") ||
		redis.HasErrorPrefix(err, "TRYAGAIN")
}

// lane returns that of the node that has key.
func (b *batcher) lane(ctx context.Context, key string) (*lane, error) {
	node, ok := b.client.(*redis.Client)
	if !ok {
		c, err := primary(ctx, b.client, key)
		if err != nil {
			return nil, err
		}
		if node, ok = c.(*redis.Client); !ok {
			return nil, fmt.Errorf("credits: a client of type %T cannot be used", c)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.nodes[node]
	if l == nil {
		l = &lane{node: node, durable: b.durable, waits: b.waits}
		b.nodes[node] = l
	}
	return l, nil
}

func (l *lane) call(ctx context.Context, fcall []any) (r []string, waited, err error) {
	c := &waitingCall{cmd: redis.NewStringSliceCmd(ctx, fcall...), done: make(chan struct{}), since: time.Now()}
	if err := l.enqueue(c); err != nil {
		return nil, nil, err
	}
	select {
	case <-c.done:
		return c.cmd.Val(), c.waited, c.err
	case <-ctx.Done():
	}
	l.mu.Lock()
	sent := c.taken
	c.taken = true
	l.mu.Unlock()
	if sent {
		return nil, nil, context.Cause(ctx) // it may be carried out all the same
	}
	return nil, nil, fmt.Errorf("%w: %w", errNotSent, context.Cause(ctx))
}

func (l *lane) enqueue(c *waitingCall) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= maxQueued {
		return fmt.Errorf("%w: %d calls wait already", errNotSent, maxQueued)
	}
	l.queue = append(l.queue, c)
	most := lanes
	if l.durable != (Durability{}) {
		most = waitLanes
	}
	if l.running < most {
		l.running++
		go l.send()
	}
	return nil
}

// send sends what waits until nothing does.
func (l *lane) send() {
	for batch := l.take(nil); len(batch) > 0; batch = l.take(batch) {
		l.exec(batch)
		// Whoever was answered just now, and wants more, comes along: without this the next pipeline would be nearly
		// empty.
		runtime.Gosched()
	}
}

// take returns the calls that waited longest; an empty batch ends the goroutine. batch is used again.
func (l *lane) take(batch []*waitingCall) []*waitingCall {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(batch)
	batch = batch[:0]
	n, now := 0, time.Now()
	for n < len(l.queue) && len(batch) < maxBatch {
		c := l.queue[n]
		n++
		switch {
		case c.taken: // its caller gave up
			continue
		case now.Sub(c.since) > patience: // the node hangs; nobody has to wait forever, whatever context came along
			c.err = fmt.Errorf("%w: it did not get its turn in time", errNotSent)
			close(c.done)
		default:
			batch = append(batch, c)
		}
		c.taken = true
	}
	rest := copy(l.queue, l.queue[n:])
	clear(l.queue[rest:])
	l.queue = l.queue[:rest]
	if len(batch) == 0 {
		l.running--
	}
	return batch
}

// exec sends calls on one connection, and behind them the wait for their writes. The client's own timeouts bound it: a
// caller that gives up must not cost the others their replies.
func (l *lane) exec(batch []*waitingCall) {
	ctx := context.Background()
	p := l.node.Pipeline()
	for _, c := range batch {
		_ = p.Process(ctx, c.cmd) // only queues it
	}
	w := l.durable.wait(ctx, p)
	start := time.Now()
	_, sent := p.Exec(ctx)
	if w != nil {
		l.waits.Observe(time.Since(start).Seconds())
	}
	waited := l.durable.reached(w)
	for _, c := range batch {
		c.waited, c.err = waited, errorOf(c.cmd, sent)
		close(c.done)
	}
}
