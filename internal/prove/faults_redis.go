package prove

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
)

// redisKilled kills the leading server, which then starts again.
func redisKilled(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	err := c.stage.leading().Kill()
	return "", c.stage.restart, err
}

func serverFrozen(of func(s *stage) *local.Process) injection {
	return func(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		p := of(c.stage)
		return "", func(context.Context) error { return p.Signal(syscall.SIGCONT) }, p.Signal(syscall.SIGSTOP)
	}
}

func command(args ...any) injection {
	return func(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		return "", nil, c.stage.client.Do(ctx, args...).Err()
	}
}

func onStream(do func(ctx context.Context, c *campaign, stream string) error) injection {
	return func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		stream := c.config.StreamPrefix + types[r.IntN(len(types))]
		return stream, nil, do(ctx, c, stream)
	}
}

// flushAway empties Redis while a group has events to read.
func flushAway(ctx context.Context, c *campaign, stream string) error {
	if err := c.away(ctx, stream); err != nil {
		return err
	}
	return c.stage.client.FlushAll(ctx).Err()
}

func replace(ctx context.Context, c *campaign, stream string) error {
	return replaceStream.Run(ctx, c.stage.client, []string{stream}).Err()
}

// replaceStream leaves an empty stream whose last id is greater than all ids that it had.
var replaceStream = redis.NewScript(`
	redis.call('DEL', KEYS[1])
	redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'somebody', 'else'))
	return 1`)

// away creates a group on the stream that never reads, and waits until a relay has recorded it.
func (c *campaign) away(ctx context.Context, stream string) error {
	c.unread.Store(stream, true)
	err := c.stage.client.XGroupCreateMkStream(ctx, stream, groupAway, "0").Err()
	if err != nil && !redis.HasErrorPrefix(err, "BUSYGROUP") {
		return err
	}
	return c.affect(ctx, "SELECT FROM outbox_stream WHERE stream = $1 AND $2 = ANY (groups)", stream, groupAway)
}

// retryDead deletes a stream and retries one of its dead events. The retry is refused until the stream is restored.
func retryDead(ctx context.Context, c *campaign, stream string) error {
	client := c.stage.client
	if err := c.away(ctx, stream); err != nil {
		return err
	}
	first, err := client.XRangeN(ctx, stream, "-", "+", 1).Result()
	if err != nil || len(first) == 0 {
		return errors.Join(err, errors.New("the stream has no entry that could be dead"))
	}
	dead := consumer.DeadEntry{
		DeadStream: consumer.DeadStream(client, stream), Stream: stream, EntryID: first[0].ID, Group: groupAway,
	}
	add := &redis.XAddArgs{Stream: dead.DeadStream, Values: first[0].Values}
	if dead.DeadID, err = client.XAdd(ctx, add).Result(); err != nil {
		return err
	}
	_, err = client.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, stream)
		return p.XGroupCreateMkStream(ctx, stream, groupAway, "0").Err()
	})
	if err != nil {
		return err
	}
	return repeat(ctx, func() (bool, error) {
		err := consumer.Retry(ctx, client, dead)
		if errors.Is(err, consumer.ErrUnrestored) {
			return false, nil
		}
		return true, err
	})
}

// putBack copies a stream, waits until it has a new event, and puts the copy back.
func putBack(ctx context.Context, c *campaign, stream string) error {
	client := c.stage.client
	var old string
	err := repeat(ctx, func() (done bool, err error) {
		if old, err = client.Dump(ctx, stream).Result(); errors.Is(err, redis.Nil) {
			return false, nil
		}
		return true, err
	})
	if err != nil {
		return err
	}
	n := client.XLen(ctx, stream).Val()
	if err := repeat(ctx, func() (bool, error) { return client.XLen(ctx, stream).Val() > n, nil }); err != nil {
		return err
	}
	return client.RestoreReplace(ctx, stream, 0, old).Err()
}

// redisSetting changes a setting of the leading server and restores it.
func redisSetting(name, value, normal string) injection {
	return func(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		err := c.stage.client.ConfigSet(ctx, name, value).Err()
		return "", func(ctx context.Context) error { return c.stage.client.ConfigSet(ctx, name, normal).Err() }, err
	}
}

// redisReadOnly makes the leading server a replica of a server that does not exist.
func redisReadOnly(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	err := c.stage.client.ReplicaOf(ctx, "127.0.0.1", "1").Err()
	return "", func(ctx context.Context) error { return c.stage.client.ReplicaOf(ctx, "no", "one").Err() }, err
}

// redisFailover lets the replica fall behind, kills the server and promotes the replica. Afterwards the old server is
// the replica.
func redisFailover(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	s := c.stage
	if err := s.replicaInStep(ctx); err != nil {
		return "", nil, err
	}
	behind := time.Duration(r.IntN(1000)) * time.Millisecond
	s.replication.Set(link.Trouble{Stall: true})
	pause.For(ctx, behind)
	err := s.leading().Kill()
	s.replication.Set(link.Trouble{Refuse: true}) // entries that the replica has not received are lost
	err = errors.Join(err, s.failOver(context.WithoutCancel(ctx)))
	s.replication.Set(link.Trouble{})
	return fmt.Sprintf("%v behind", behind), s.follow, err
}

// redisStrange leads all links to Redis through a proxy with oddities.
func redisStrange(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	what, odd := "refusals", link.Oddities{MaxArgs: 3999, Strict: true, Refuse: link.Refusals}
	if r.IntN(2) == 0 {
		what, odd.Refuse, odd.Identities = "identities", nil, true
	}
	s := c.stage
	p, err := link.NewStrange(ctx, s.leading().Addr(), odd)
	if err != nil {
		return "", nil, err
	}
	lead := func(addr string) {
		for _, l := range s.linksTo(serverRedis) {
			l.To(addr)
		}
	}
	lead(p.Addr())
	return what, func(context.Context) error {
		lead(s.leading().Addr())
		p.Close()
		return nil
	}, nil
}

// replicaInStep waits until the replica is connected: a replica that never was connected has no data and cannot lead.
func (s *stage) replicaInStep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := repeat(ctx, func() (bool, error) {
		info, err := s.client.InfoMap(ctx, "replication").Result()
		return err == nil && info["Replication"]["connected_slaves"] == "1" &&
			s.client.Wait(ctx, 1, time.Second).Val() == 1, nil
	})
	if err != nil {
		return fmt.Errorf("the replica is not in step: %w", err)
	}
	return nil
}
