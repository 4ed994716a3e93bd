package credits

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/singleflight"

	"posthaste/internal/redisurl"
)

// Connections notifies a Bank of each server that its client connects to, before the client sends anything else there.
// It belongs to one client; see Configure.
type Connections struct {
	// before is the hook that the client had already.
	before func(context.Context, *redis.Conn) error
	bank   atomic.Pointer[Bank]

	meets singleflight.Group
	mu    sync.Mutex
	// met has the result of the comparison with each server. After a success, the server has all operations that the
	// ledger has, or the buckets that lack some are closed.
	met map[server]meeting
}

// server identifies a Redis process and its replication history. After a restart or failover, either differs, and the
// server may have lost data.
type server struct{ run, history string }

type meeting struct {
	err error
	at  time.Time
}

const (
	// maxMet is the maximum number of servers in met.
	maxMet = 1000
	// meetAgain is how long a failed comparison also applies to other connections to the server.
	meetAgain = 100 * time.Millisecond
)

// errNotMet means that the comparison failed, so the connection is not used.
var errNotMet = errors.New("cannot determine which operations on balances a new Redis server lacks")

// onConnect is the client's hook for new connections. Without the comparison, a process whose marks are up to a second
// old could reuse an operation number that is already in the ledger, if the server lacks that operation.
func (c *Connections) onConnect(ctx context.Context, cn *redis.Conn) error {
	if c.before != nil {
		if err := c.before(ctx, cn); err != nil {
			return err
		}
	}
	b := c.bank.Load()
	if b == nil {
		return nil // no Bank uses the client yet
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	s, role, err := identify(ctx, cn)
	_, cluster := b.o.Redis.(*redis.ClusterClient)
	switch {
	case err != nil:
	case role == "": // a sentinel, or INFO is refused
		return nil
	case role != "master" && cluster && !c.any():
		return nil // it may be the only known node of the cluster; it redirects to the others
	case role != "master": // it may be promoted later, while this connection stays open
		err = errors.New("the server is a replica")
	default:
		err = c.meet(ctx, b, cn, s)
	}
	if err != nil {
		return fmt.Errorf("%w: %w: %w", errNotSent, errNotMet, err)
	}
	return nil
}

// identify reads the identity and role of the server. The role is empty for a sentinel, and if INFO is refused.
func identify(ctx context.Context, cn *redis.Conn) (s server, role string, err error) {
	info, err := redisurl.Info(ctx, cn, "server", "replication")
	switch {
	case redisurl.Refused(err):
		return server{}, "", nil
	case err != nil:
		return server{}, "", fmt.Errorf("identify the server: %w", err)
	}
	return server{info["run_id"], info["master_replid"]}, info["role"], nil
}

// any reports whether the comparison with at least one server has succeeded.
func (c *Connections) any() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range c.met {
		if m.err == nil {
			return true
		}
	}
	return false
}

// meet closes the buckets of a server that lack operations of the ledger, unless it has done so before. Connections
// that are opened at the same time share one comparison.
func (c *Connections) meet(ctx context.Context, b *Bank, cn *redis.Conn, s server) error {
	_, err, _ := c.meets.Do(s.run+s.history, func() (any, error) {
		c.mu.Lock()
		m, ok := c.met[s]
		c.mu.Unlock()
		if ok && (m.err == nil || time.Since(m.at) < meetAgain) {
			return nil, m.err
		}
		err := b.compare(ctx, cn)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.met == nil || len(c.met) >= maxMet {
			c.met = map[server]meeting{}
		}
		c.met[s] = meeting{err, time.Now()}
		return nil, err
	})
	return err
}

// compare closes the buckets for which a server lacks operations. Afterwards this process knows the current marks of
// the ledger.
func (b *Bank) compare(ctx context.Context, cn *redis.Conn) error {
	rows, err := b.freshMarks(ctx)
	if err != nil {
		return err
	}
	for i, r := range rows {
		b.learn(r)
		if v := b.known(r.Bucket); v.epoch == r.Epoch {
			rows[i].Mark = max(r.Mark, v.floor) // this process may know of operations that are not in the ledger yet
		}
	}
	if len(rows) > 0 {
		b.used.Store(true)
	}
	lost, err := lacking(ctx, cn, rows)
	if err == nil && len(lost) > 0 {
		err = b.closeLost(ctx, cn, lost)
	}
	return err
}

// freshMarks reads the ledger's marks. Concurrent callers share a read if it began after their calls. The marks
// include every entry that a sync had taken from a stream before the read.
func (b *Bank) freshMarks(ctx context.Context) ([]LedgerBucket, error) {
	type read struct {
		at   time.Time
		rows []LedgerBucket
	}
	for asked := time.Now(); ; {
		v, err, _ := b.loads.Do("marks", func() (any, error) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			at := time.Now()
			rows, err := settledBuckets(ctx, b.o.Pool)
			return read{at, rows}, err
		})
		if err != nil {
			return nil, err
		}
		if r, _ := v.(read); !r.at.Before(asked) {
			return slices.Clone(r.rows), nil // the caller changes them
		}
	}
}

// lost is a bucket to close: its epoch in Redis, and an operation number that Redis has not reached.
type lost struct {
	bucket       int16
	epoch, floor int64
}

// lacking returns the buckets for which the server behind cn lacks operations, or has an old epoch. Other processes may
// still know only the old epoch and would continue with it. A bucket without an epoch refuses every operation and needs
// no closing. Buckets of other nodes are skipped.
func lacking(ctx context.Context, cn *redis.Conn, rows []LedgerBucket) (list []lost, err error) {
	for try := 0; ; try++ {
		p := cn.Pipeline()
		cmds := make([]*redis.Cmd, len(rows))
		for i, r := range rows {
			cmds[i] = p.FCallRO(ctx, fnLook, []string{epochKey(r.Bucket), streamKey(r.Bucket)})
		}
		if _, err := p.Exec(ctx); err != nil && !redisurl.IsReply(err) {
			return nil, fmt.Errorf("look at the buckets: %w", err)
		}
		missing := false
		list = list[:0]
		for i, cmd := range cmds {
			switch t, err := readState(cmd); {
			case functionMissing(err):
				missing = true
			case movedAway(err):
			case err != nil:
				return nil, fmt.Errorf("look at bucket %d: %w", rows[i].Bucket, err)
			case t.foreign, t.number() == 0, t.number() > rows[i].Epoch:
			case t.number() < rows[i].Epoch:
				list = append(list, lost{rows[i].Bucket, t.number(), max(rows[i].Mark, t.n+1)})
			case t.n < rows[i].Mark:
				list = append(list, lost{rows[i].Bucket, t.number(), rows[i].Mark})
			}
		}
		if !missing {
			return list, nil
		}
		if try > 0 {
			return nil, errors.New("the server does not keep the functions")
		}
		if err := cn.FunctionLoadReplace(ctx, library).Err(); err != nil {
			return nil, fmt.Errorf("load the functions: %w", err)
		}
	}
}

// closeLost closes buckets, unless the balances are known to belong to another database, for which operations are
// refused anyway.
func (b *Bank) closeLost(ctx context.Context, cn *redis.Conn, list []lost) error {
	mine, known := b.owner.mine(ctx, true)
	theirs, err := cn.Get(ctx, ownerKey).Result()
	switch {
	case errors.Is(err, redis.Nil):
	case movedAway(err):
		// Another node of the cluster has the owner key. If this process has never seen that the balances belong to its
		// database, it has carried out no operation, and has no marks from before this connection.
		if known && b.owner.ours.Load() == nil {
			return nil
		}
	case err != nil:
		return fmt.Errorf("read the owner of the balances: %w", err)
	case known && theirs != mine:
		return nil
	}
	p := cn.Pipeline()
	for _, l := range list {
		p.FCall(ctx, fnCheck, []string{epochKey(l.bucket)}, l.epoch, l.floor)
	}
	cmds, sent := p.Exec(ctx)
	if sent != nil && !redisurl.IsReply(sent) {
		return fmt.Errorf("close buckets: %w", sent)
	}
	for i, cmd := range cmds {
		// An error about the keys of a bucket also makes every operation of the bucket fail, so the bucket needs no
		// closing.
		if err := cmd.Err(); err != nil && !ofKeys(err) && !movedAway(err) {
			return fmt.Errorf("close bucket %d: %w", list[i].bucket, err)
		}
	}
	b.log.Warn("redis lacks operations that the ledger has: their buckets are closed until they are rebuilt",
		"buckets", len(list))
	return nil
}
