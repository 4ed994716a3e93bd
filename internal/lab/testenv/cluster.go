package testenv

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
)

// RedisCluster is a Redis Cluster of one test. Its nodes are numbered as in Nodes, the original masters first.
type RedisCluster struct {
	*local.Cluster
	// Client connects to it; it is closed when the test ends.
	Client *redis.ClusterClient

	o local.ClusterOptions
	// fences are the links to the two ports of each node; a node is known by the source address of its connections.
	fences [][2]*link.Link
}

// Cluster starts a cluster of masters with replicas replicas each. Config lines are those of redis.conf.
func Cluster(tb testing.TB, masters, replicas int, config ...string) *RedisCluster {
	tb.Helper()
	return ClusterOf(tb, local.ClusterOptions{Masters: masters, Replicas: replicas, Config: config})
}

// ClusterOf is Cluster with all options.
func ClusterOf(tb testing.TB, o local.ClusterOptions) *RedisCluster {
	tb.Helper()
	return clusterWith(tb, redisBin(tb), &RedisCluster{o: o})
}

// ValkeyCluster is Cluster with Valkey, which has WAITAOF.
func ValkeyCluster(tb testing.TB, masters, replicas int, config ...string) *RedisCluster {
	tb.Helper()
	return clusterWith(tb, valkeyBin(tb), &RedisCluster{o: local.ClusterOptions{
		Masters: masters, Replicas: replicas, Config: config,
	}})
}

// FencedCluster is Cluster whose nodes can be separated from each other while clients reach all of them; see Cut.
func FencedCluster(tb testing.TB, masters, replicas int, config ...string) *RedisCluster {
	tb.Helper()
	c := &RedisCluster{o: local.ClusterOptions{Masters: masters, Replicas: replicas, Config: config}}
	// Nodes connect to each other through these proxies, each from its own address.
	c.o.Node = func(i, port int) []string {
		f := [2]*link.Link{
			NewLink(tb, fmt.Sprintf("127.0.0.1:%d", port)), NewLink(tb, fmt.Sprintf("127.0.0.1:%d", port+10_000)),
		}
		c.fences = append(c.fences, f)
		return []string{
			"bind-source-addr " + sourceOf(i), fmt.Sprintf("cluster-announce-port %d", f[0].Port()),
			fmt.Sprintf("cluster-announce-bus-port %d", f[1].Port()),
		}
	}
	return clusterWith(tb, redisBin(tb), c)
}

func clusterWith(tb testing.TB, bin string, c *RedisCluster) *RedisCluster {
	tb.Helper()
	c.o.Config = append([]string{kept}, c.o.Config...)
	var err error
	c.Cluster, err = local.StartCluster(tb.Context(), bin, folder(tb, "redis"), c.o)
	Must(tb, err)
	tb.Cleanup(func() { _ = c.Kill() })
	o := &redis.ClusterOptions{
		Username: c.o.User, Password: c.o.Password, TLSConfig: c.o.TLS, Protocol: 2, MaxRedirects: 16,
	}
	for _, n := range c.Nodes {
		o.Addrs = append(o.Addrs, n.Addr())
	}
	c.Client = redis.NewClusterClient(o)
	tb.Cleanup(func() { _ = c.Client.Close() })
	return c
}

func (c *RedisCluster) do(tb testing.TB, i int, args ...any) {
	tb.Helper()
	Must(tb, c.Do(tb.Context(), i, args...))
}

// On returns a client of one node, which does not follow redirections.
func (c *RedisCluster) On(tb testing.TB, i int) *redis.Client {
	tb.Helper()
	client := c.client(i)
	tb.Cleanup(func() { _ = client.Close() })
	return client
}

func (c *RedisCluster) client(i int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: c.Nodes[i].Addr(), Username: c.o.User, Password: c.o.Password, TLSConfig: c.o.TLS, Protocol: 2,
	})
}

// Slot returns the slot of a key.
func (c *RedisCluster) Slot(tb testing.TB, key string) int {
	tb.Helper()
	slot, err := c.Client.ClusterKeySlot(tb.Context(), key).Result()
	Must(tb, err)
	return int(slot)
}

// Master returns the number of the node that serves a slot according to that node itself: other nodes may be out of
// date for a moment, even after a SETSLOT. If all nodes answer, and none names itself for 10 s, it assigns the slot.
func (c *RedisCluster) Master(tb testing.TB, slot int) (master int) {
	tb.Helper()
	began := time.Now()
	Eventually(tb, 30*time.Second, func() error {
		var named []int
		var errs []error
		for i, n := range c.Nodes {
			if !n.Running() {
				errs = append(errs, fmt.Errorf("node %d does not run", i))
				continue
			}
			client := c.client(i)
			m, err := c.MasterBy(tb.Context(), client, slot)
			_ = client.Close()
			if err == nil && m == i {
				master = i
				return nil
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("node %d: %w", i, err))
				continue
			}
			named = append(named, m)
		}
		err := fmt.Errorf("no node serves slot %d: the nodes name %v %v", slot, named, errs)
		if len(errs) == 0 && time.Since(began) > 10*time.Second {
			tb.Log(err)
			c.assign(tb, slot, named)
		}
		return err
	})
	return master
}

// assign gives a slot to that of some nodes which has the most of its keys, as redis-cli --cluster fix does.
func (c *RedisCluster) assign(tb testing.TB, slot int, nodes []int) {
	tb.Helper()
	to, most := nodes[0], int64(-1)
	for _, i := range nodes {
		if n, err := c.On(tb, i).ClusterCountKeysInSlot(tb.Context(), slot).Result(); err == nil && n > most {
			to, most = i, n
		}
	}
	c.do(tb, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", c.IDs[(to+1)%len(c.IDs)]) // raises its epoch
	c.EndMove(tb, slot, to)
}

// MasterBy returns the number of the node that serves a slot according to the node that by queries.
func (c *RedisCluster) MasterBy(ctx context.Context, by redis.Cmdable, slot int) (int, error) {
	shards, err := by.ClusterShards(ctx).Result()
	if err != nil {
		return 0, err
	}
	for _, s := range shards {
		for _, r := range s.Slots {
			if int(r.Start) > slot || slot > int(r.End) {
				continue
			}
			for _, n := range s.Nodes {
				if i := slices.Index(c.IDs, n.ID); n.Role == "master" && n.Health == "online" && i >= 0 {
					return i, nil
				}
			}
		}
	}
	return 0, fmt.Errorf("no node serves slot %d", slot)
}

// BeginMove makes a node import a slot from its owner, which it returns. New keys are then created there, and a call
// for two keys of which one has moved gets TRYAGAIN.
func (c *RedisCluster) BeginMove(tb testing.TB, slot, to int) (from int) {
	tb.Helper()
	from = c.Master(tb, slot)
	c.sameEpoch(tb)
	c.do(tb, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", c.IDs[from])
	c.do(tb, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", c.IDs[to])
	return from
}

// sameEpoch waits until all nodes have the highest epoch. The new owner of a slot takes an epoch higher than those it
// has seen: if the old owner had one that it has not seen, each would believe that the other has the slot, and no
// node would serve it.
func (c *RedisCluster) sameEpoch(tb testing.TB) {
	tb.Helper()
	Eventually(tb, 30*time.Second, func() error {
		epochs := map[string]bool{}
		for i, n := range c.Nodes {
			if !n.Running() {
				continue
			}
			client := c.client(i)
			info, err := client.ClusterInfo(tb.Context()).Result()
			_ = client.Close()
			if err != nil {
				return err
			}
			_, rest, _ := strings.Cut(info, "cluster_current_epoch:")
			epoch, _, _ := strings.Cut(rest, "\r")
			epochs[epoch] = true
		}
		if len(epochs) != 1 {
			return fmt.Errorf("the nodes know the epochs %v", slices.Collect(maps.Keys(epochs)))
		}
		return nil
	})
}

// MoveKeys moves at most n keys of a slot that is being moved, and returns their number.
func (c *RedisCluster) MoveKeys(tb testing.TB, slot, from, to, n int) int {
	tb.Helper()
	client := c.client(from)
	defer client.Close()
	keys, err := client.ClusterGetKeysInSlot(tb.Context(), slot, n).Result()
	Must(tb, err)
	if len(keys) == 0 {
		return 0
	}
	args := []any{"MIGRATE", "127.0.0.1", c.Nodes[to].Port, "", 0, 10_000, "REPLACE"}
	if c.o.User != "" {
		args = append(args, "AUTH2", c.o.User, c.o.Password)
	} else if c.o.Password != "" {
		args = append(args, "AUTH", c.o.Password)
	}
	args = append(args, "KEYS")
	for _, k := range keys {
		args = append(args, k)
	}
	c.do(tb, from, args...)
	return len(keys)
}

// EndMove sets the new owner of the slot on all masters.
func (c *RedisCluster) EndMove(tb testing.TB, slot, to int) {
	tb.Helper()
	c.do(tb, to, "CLUSTER", "SETSLOT", slot, "NODE", c.IDs[to]) // the new owner first, so that the slot always has one
	for i, n := range c.Nodes {
		if i == to || !n.Running() {
			continue
		}
		if err := c.Do(tb.Context(), i, "CLUSTER", "SETSLOT", slot, "NODE", c.IDs[to]); err != nil && !notMaster(err) {
			tb.Fatal(err)
		}
	}
}

// notMaster reports that a node needs no SETSLOT: it is a replica, maybe because it has just lost its last slot.
func notMaster(err error) bool { return strings.Contains(err.Error(), "only with masters") }

// Move moves a slot with all its keys, as redis-cli does.
func (c *RedisCluster) Move(tb testing.TB, slot, to int) {
	tb.Helper()
	from := c.Master(tb, slot)
	if from == to {
		return
	}
	c.BeginMove(tb, slot, to)
	for c.MoveKeys(tb, slot, from, to, 10) > 0 { //nolint:revive // repeats
	}
	c.EndMove(tb, slot, to)
}

// Drain moves all slots of a node to another one. Slots without keys move at once, so no client may create the first
// key of a slot at the same time.
func (c *RedisCluster) Drain(tb testing.TB, from, to int) {
	tb.Helper()
	source := c.On(tb, from)
	shards, err := source.ClusterShards(tb.Context()).Result()
	Must(tb, err)
	var slots []int
	for _, s := range shards {
		mine := slices.ContainsFunc(s.Nodes, func(n redis.Node) bool { return n.ID == c.IDs[from] })
		for _, r := range s.Slots {
			for slot := int(r.Start); mine && slot <= int(r.End); slot++ {
				slots = append(slots, slot)
			}
		}
	}
	counts := make([]*redis.IntCmd, len(slots))
	c.pipeline(tb, from, func(p redis.Pipeliner) {
		for i, slot := range slots {
			counts[i] = p.ClusterCountKeysInSlot(tb.Context(), slot)
		}
	})
	var empty []int
	for i, slot := range slots {
		if counts[i].Val() > 0 {
			c.Move(tb, slot, to)
		} else {
			empty = append(empty, slot)
		}
	}
	order := []int{to}
	for i, n := range c.Nodes {
		if i != to && n.Running() {
			order = append(order, i)
		}
	}
	for _, i := range order {
		c.pipeline(tb, i, func(p redis.Pipeliner) {
			for _, slot := range empty {
				if i == to { // this raises its epoch, so its view wins
					p.Do(tb.Context(), "CLUSTER", "SETSLOT", slot, "IMPORTING", c.IDs[from])
				}
				p.Do(tb.Context(), "CLUSTER", "SETSLOT", slot, "NODE", c.IDs[to])
			}
		})
	}
}

func (c *RedisCluster) pipeline(tb testing.TB, i int, fill func(p redis.Pipeliner)) {
	tb.Helper()
	client := c.client(i)
	defer client.Close()
	pipe := client.Pipeline()
	fill(pipe)
	if _, err := pipe.Exec(tb.Context()); err != nil && !notMaster(err) {
		tb.Fatalf("node %d: %v", i, err)
	}
}

// Cut separates the node from all others in both directions, until Join. Clients still reach it.
func (c *RedisCluster) Cut(i int) { c.fence(i, true) }

// Join ends Cut.
func (c *RedisCluster) Join(i int) { c.fence(i, false) }

func (c *RedisCluster) fence(i int, cut bool) {
	for j, links := range c.fences {
		for k := range c.fences {
			if j != k && (j == i || k == i) {
				links[0].Shut(sourceOf(k), cut)
				links[1].Shut(sourceOf(k), cut)
			}
		}
	}
}

// sourceOf is the source address of a node's connections.
func sourceOf(i int) string { return "127.0.1." + strconv.Itoa(i+1) }

// RedisSentinel is a master with replicas and Sentinels of one test.
type RedisSentinel struct {
	*local.Sentinel
}

// Sentinel starts a master with replicas, and three Sentinels that monitor them. Config lines are those of
// redis.conf.
func Sentinel(tb testing.TB, replicas int, config ...string) *RedisSentinel {
	tb.Helper()
	return SentinelOf(tb, local.SentinelOptions{Replicas: replicas, Sentinels: 3, Config: config})
}

// SentinelOf is Sentinel with all options.
func SentinelOf(tb testing.TB, o local.SentinelOptions) *RedisSentinel {
	tb.Helper()
	o.Config = append([]string{kept}, o.Config...)
	s, err := local.StartSentinel(tb.Context(), redisBin(tb), folder(tb, "redis"), o)
	Must(tb, err)
	tb.Cleanup(func() { _ = s.Kill() })
	return &RedisSentinel{s}
}

// Promoted waits until the Sentinels have a master other than old, and returns it.
func (s *RedisSentinel) Promoted(tb testing.TB, old int) (master int) {
	tb.Helper()
	Eventually(tb, 60*time.Second, func() (err error) {
		if master, err = s.Master(tb.Context()); err == nil && master == old {
			err = errors.New("no replica was promoted")
		}
		return err
	})
	return master
}
