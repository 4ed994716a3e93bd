package credits

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/batch"
)

const (
	// lanes is the maximum number of concurrent pipelines to one node. With two, one is written while the other is
	// executed.
	lanes = 2
	// waitLanes is the maximum if each pipeline waits for disks or replicas.
	waitLanes = 8
	// maxBatch is the maximum number of calls in a pipeline; maxQueued is the maximum number of queued calls for a
	// node.
	maxBatch  = 256
	maxQueued = 20_000
)

// errNotSent means that a call gave up before it was sent.
var errNotSent = errors.New("the call was not sent")

// errNoReply means that a call has neither a reply nor an error.
var errNoReply = errors.New("the call has no reply")

// batcher lets concurrent calls share pipelines. A call is sent at once unless the maximum number of
// pipelines is running; then it waits for the next pipeline. Each call has its own reply, error and deadline. The calls
// of a pipeline share its round trip and its wait for durability.
type batcher struct {
	client  redis.UniversalClient
	durable Durability

	mu    sync.Mutex
	lanes map[*redis.Client]*lane
}

// lane is the queue of calls to one node.
type lane struct {
	*batcher

	node  *redis.Client
	queue batch.Queue[waitingCall]
}

// waitingCall is one FCALL and its outcome. The outcome is written before done is closed.
type waitingCall struct {
	cmd    *redis.StringSliceCmd
	waited error
	err    error
	done   chan struct{}
	since  time.Time
}

// call sends an FCALL that writes, with key among its keys, and waits until the write is durable. waited is nil if it
// is durable. nothingDone distinguishes the errors.
func (b *batcher) call(ctx context.Context, key string, fcall []any) (r []string, waited, err error) {
	l, err := b.lane(ctx, key)
	if err != nil {
		return nil, nil, err
	}
	r, waited, err = l.enqueue(ctx, fcall)
	switch {
	case functionMissing(err):
		loaded := loadLibrary(ctx, b.client) // the error may be that of another node
		if r, waited, err = l.enqueue(ctx, fcall); functionMissing(err) {
			err = errors.Join(err, loaded)
		}
	case movedAway(err):
		// The cluster client follows redirections and updates its map of slots. That sends one call at a time, until
		// the map is current.
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

// alone sends an FCALL outside a pipeline shared with others, and follows the redirections of the cluster.
func (b *batcher) alone(ctx context.Context, key string, fcall []any) (r []string, waited, err error) {
	if b.durable == (Durability{}) {
		cmd := redis.NewStringSliceCmd(ctx, fcall...)
		err = b.client.Process(ctx, once{cmd})
		return cmd.Val(), nil, err
	}
	node, err := primary(ctx, b.client, key)
	if err != nil {
		return nil, nil, err
	}
	asking := false
	for range followed {
		// WAIT has no key. The cluster client could not route it to the same node, so the pipeline goes to the node
		// itself.
		c := &waitingCall{cmd: redis.NewStringSliceCmd(ctx, fcall...)}
		b.exec(ctx, node, asking, c)
		r, waited, err = c.cmd.Val(), c.waited, c.err
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

// followed is the maximum number of nodes that one call is sent to.
const followed = 4

// another returns a client for the node at addr, with the options of node.
func another(node *redis.Client, addr string) *redis.Client {
	o := *node.Options()
	o.Addr, o.NodeAddress, o.MaxRetries = addr, "", -1 // the client stores -1 as 0, and 0 would mean three retries
	o.PoolSize, o.PipelinePoolSize = 1, -1
	return redis.NewClient(&o)
}

// once marks a call that the client must not retry after a broken connection: the error of the last attempt would hide
// whether an earlier one was carried out.
type once struct{ redis.Cmder }

// NoRetry implements the interface by which the client decides whether to retry.
func (once) NoRetry() bool { return true }

// errorOf returns the error of a command in a pipeline; sent is the error of the pipeline. If the server refuses a new
// connection (password, number of clients), only the pipeline has an error: the client leaves its commands without
// reply and error.
func errorOf(cmd *redis.StringSliceCmd, sent error) error {
	switch {
	case cmd.Err() != nil || cmd.Val() != nil:
		return cmd.Err()
	case sent != nil:
		return sent
	}
	return errNoReply
}

// movedAway reports whether a cluster node refused a call because another node has the keys.
func movedAway(err error) bool {
	return err != nil && (redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK") ||
		redis.HasErrorPrefix(err, "TRYAGAIN"))
}

// lane returns the lane of the node that has key.
func (b *batcher) lane(ctx context.Context, key string) (*lane, error) {
	node, err := primary(ctx, b.client, key)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.lanes[node]
	if l == nil {
		l = &lane{batcher: b, node: node}
		l.queue.Send, l.queue.Flights, l.queue.Most = l.send, lanes, maxBatch
		if b.durable != (Durability{}) {
			l.queue.Flights = waitLanes
		}
		b.lanes[node] = l
	}
	return l, nil
}

// enqueue lets the next pipeline send an FCALL, and waits for the reply.
func (l *lane) enqueue(ctx context.Context, fcall []any) (r []string, waited, err error) {
	if _, n := l.queue.State(); n >= maxQueued {
		return nil, nil, fmt.Errorf("%w: %d calls wait already", errNotSent, n)
	}
	c := &waitingCall{cmd: redis.NewStringSliceCmd(ctx, fcall...), done: make(chan struct{}), since: time.Now()}
	if !l.queue.Do(ctx, c, c.done) {
		return nil, nil, fmt.Errorf("%w: %w", errNotSent, context.Cause(ctx))
	}
	select {
	case <-c.done:
		return c.cmd.Val(), c.waited, c.err
	default:
		return nil, nil, context.Cause(ctx) // Redis may still carry it out
	}
}

// send sends the oldest calls of the queue.
func (l *lane) send(func()) {
	calls := slices.DeleteFunc(l.queue.Take(), func(c *waitingCall) bool {
		late := time.Since(c.since) > patience // applies even if the context has no deadline
		if late {
			c.err = fmt.Errorf("%w: it did not get its turn in time", errNotSent)
			close(c.done)
		}
		return late
	})
	if len(calls) > 0 {
		// Only the timeouts of the client limit it: a caller that gives up must not lose the others their replies.
		l.exec(context.Background(), l.node, false, calls...)
		for _, c := range calls {
			close(c.done)
		}
		// Yield, so that callers that just received a reply can queue their next call. Without this, the next pipeline
		// would be nearly empty.
		runtime.Gosched()
	}
}

// exec sends calls on one connection of a node, followed by the command that waits for their writes. asking: the node
// is receiving the keys of the call from another one.
func (b *batcher) exec(ctx context.Context, node *redis.Client, asking bool, calls ...*waitingCall) {
	p := node.Pipeline()
	if asking {
		p.Do(ctx, "asking")
	}
	for _, c := range calls {
		_ = p.Process(ctx, c.cmd) // only queues it
	}
	w := b.durable.wait(ctx, p)
	_, sent := p.Exec(ctx)
	waited := b.durable.reached(w)
	for _, c := range calls {
		c.waited, c.err = waited, errorOf(c.cmd, sent)
	}
}
