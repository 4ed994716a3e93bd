package local

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"posthaste/internal/pause"
)

// Slots is how many slots a Redis Cluster has.
const Slots = 16384

// Access is how clients authenticate to several servers, and the servers to each other.
type Access struct {
	// User has all rights; "" means the default user, which otherwise has none. Password is the user's; the default
	// user without a Password needs none.
	User, Password string
	// TLS is a client's configuration; nil: no TLS. The lines of Config name the servers' files.
	TLS *tls.Config
}

// config returns the lines of a server, which authenticates to the others by the settings user and password.
func (a Access) config(user, password string) (lines []string) {
	switch {
	case a.User != "":
		lines = append(lines, "user default off", "user "+a.User+" on >"+a.Password+" ~* &* +@all",
			user+" "+a.User, password+" "+a.Password)
	case a.Password != "":
		lines = append(lines, "requirepass "+a.Password, password+" "+a.Password)
	}
	if a.TLS != nil {
		lines = append(lines, "tls-replication yes")
	}
	return lines
}

func (a Access) scheme() string {
	if a.TLS != nil {
		return "rediss"
	}
	return "redis"
}

func (a Access) userinfo() *url.Userinfo {
	if a.User == "" && a.Password == "" {
		return nil
	}
	return url.UserPassword(a.User, a.Password)
}

type ClusterOptions struct {
	// Masters share the slots evenly; Replicas is how many each of them has.
	Masters, Replicas int
	Access
	// Config are lines of redis.conf for every node.
	Config []string
	// Node returns further lines for a node, by its number and port; may be nil.
	Node func(i, port int) []string
}

// Cluster is a Redis Cluster that this process owns.
type Cluster struct {
	// Nodes are the masters in the order of their start, then the replicas of the first master, of the second, ...
	Nodes []*Redis
	// IDs are the nodes' ids.
	IDs []string

	bin, dir string
	o        ClusterOptions
}

// StartCluster starts a cluster with its data below dir, and returns when every node can be used. A node has the
// defaults of StartRedis; the others replace a node that is unreachable for 3 s.
func StartCluster(ctx context.Context, bin, dir string, o ClusterOptions) (*Cluster, error) {
	c := &Cluster{bin: bin, dir: dir, o: o}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	err := c.form(ctx)
	if err != nil {
		_ = c.Kill()
		return nil, fmt.Errorf("start a cluster: %w", err)
	}
	return c, nil
}

func (c *Cluster) form(ctx context.Context) error {
	for range c.o.Masters * (1 + c.o.Replicas) {
		if _, err := c.start(ctx); err != nil {
			return err
		}
	}
	for i := range c.o.Masters {
		first, last := i*Slots/c.o.Masters, (i+1)*Slots/c.o.Masters-1
		if err := c.Do(ctx, i, "CLUSTER", "ADDSLOTSRANGE", first, last); err != nil {
			return err
		}
		if err := c.Do(ctx, i, "CLUSTER", "SET-CONFIG-EPOCH", i+1); err != nil {
			return err
		}
	}
	for i := range c.Nodes[1:] {
		if err := c.meet(ctx, i+1); err != nil {
			return err
		}
	}
	for r := range c.o.Masters * c.o.Replicas {
		if err := c.Replicate(ctx, c.o.Masters+r, r/c.o.Replicas); err != nil {
			return err
		}
	}
	return c.Wait(ctx)
}

// start starts one more node, without introducing it to the others.
func (c *Cluster) start(ctx context.Context) (int, error) {
	i := len(c.Nodes)
	r, err := addRedis(ctx, c.bin, filepath.Join(c.dir, "node"+strconv.Itoa(i)), c.o.TLS, func(r *Redis) {
		r.user, r.password = c.o.User, c.o.Password
		if c.o.TLS != nil {
			r.config = append(r.config, "tls-cluster yes")
		}
		r.config = slices.Concat(r.config, c.o.config("masteruser", "masterauth"), c.o.Config)
		if c.o.Node != nil {
			r.config = append(r.config, c.o.Node(i, r.Port)...)
		}
	}, clusterEnabled, "cluster-node-timeout 3000", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1",
		"cluster-announce-ip 127.0.0.1")
	if err != nil {
		return i, err
	}
	c.Nodes = append(c.Nodes, r)
	client := r.connect(patience)
	defer client.Close()
	id, err := client.Do(ctx, "CLUSTER", "MYID").Text()
	c.IDs = append(c.IDs, id)
	return i, err
}

// Do runs a command on one node.
func (c *Cluster) Do(ctx context.Context, i int, args ...any) error {
	client := c.Nodes[i].connect(patience)
	defer client.Close()
	if err := client.Do(ctx, args...).Err(); err != nil {
		return fmt.Errorf("node %d: %v: %w", i, args[0], err)
	}
	return nil
}

func (c *Cluster) meet(ctx context.Context, i int) error {
	port, bus, err := c.announced(ctx, i)
	if err != nil {
		return err
	}
	return c.Do(ctx, 0, "CLUSTER", "MEET", "127.0.0.1", port, bus)
}

// announced returns the ports by which other nodes find a node.
func (c *Cluster) announced(ctx context.Context, i int) (port, bus string, err error) {
	client := c.Nodes[i].connect(patience)
	defer client.Close()
	text, err := client.ClusterNodes(ctx).Result()
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 2 && strings.Contains(f[2], "myself") {
			addr, _, _ := strings.Cut(f[1], ",")
			_, addr, _ = strings.Cut(addr, ":")
			port, bus, _ = strings.Cut(addr, "@")
		}
	}
	return port, bus, err
}

// Replicate makes an empty node a replica of another one. It waits until the nodes know each other.
func (c *Cluster) Replicate(ctx context.Context, i, master int) error {
	return until(ctx, func() error { return c.Do(ctx, i, "CLUSTER", "REPLICATE", c.IDs[master]) })
}

// until calls do until it succeeds, or ctx ends.
func until(ctx context.Context, do func() error) error {
	for {
		err := do()
		if err == nil || pause.For(ctx, 20*time.Millisecond) != nil {
			return err
		}
	}
}

// Add starts one more node, a master without slots, and returns its number when all nodes know it.
func (c *Cluster) Add(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	i, err := c.start(ctx)
	if err == nil {
		err = c.meet(ctx, i)
	}
	if err == nil {
		err = c.Wait(ctx)
	}
	return i, err
}

// Wait returns when all running nodes know each other, all slots are served, and the replicas are in sync.
func (c *Cluster) Wait(ctx context.Context) error {
	return until(ctx, func() error { return c.ready(ctx) })
}

func (c *Cluster) ready(ctx context.Context) error {
	var replicas int
	var known []int // by each node
	for i, n := range c.Nodes {
		if !n.Running() {
			continue
		}
		client := n.connect(time.Second)
		info, err1 := client.ClusterInfo(ctx).Result()
		role, err2 := client.Info(ctx, "replication").Result()
		slots, err3 := client.ClusterSlots(ctx).Result() //nolint:staticcheck // cluster clients call this one
		_ = client.Close()
		err := errors.Join(err1, err2, err3)
		if err == nil && (!strings.Contains(info, "cluster_state:ok") ||
			!strings.Contains(info, fmt.Sprintf("cluster_slots_ok:%d", Slots)) ||
			!strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r", len(c.Nodes)))) {
			err = errors.New("not one cluster yet")
		}
		if strings.Contains(role, "role:slave") {
			replicas++
			if err == nil && !strings.Contains(role, "master_link_status:up") {
				err = errors.New("a replica without its master")
			}
		}
		if err != nil {
			return fmt.Errorf("node %d: %w", i, err)
		}
		seen := map[string]bool{}
		for _, s := range slots {
			for _, n := range s.Nodes[min(1, len(s.Nodes)):] {
				seen[n.ID] = true
			}
		}
		known = append(known, len(seen)) // replicas are listed only once they have data
	}
	for i, n := range known {
		if n != replicas {
			return fmt.Errorf("of %d replicas the %dth node knows %d", replicas, i+1, n)
		}
	}
	return nil
}

// URL is a client's URL: all nodes in the order of their start, with user and password.
func (c *Cluster) URL() string {
	q := url.Values{}
	for _, n := range c.Nodes[1:] {
		q.Add("addr", n.Addr())
	}
	u := url.URL{Scheme: c.o.scheme(), User: c.o.userinfo(), Host: c.Nodes[0].Addr(), RawQuery: q.Encode()}
	return u.String()
}

// Stop shuts all nodes down and waits for them.
func (c *Cluster) Stop() error {
	return all(c.Nodes, (*Redis).Stop)
}

// Kill ends all nodes with SIGKILL and waits for them.
func (c *Cluster) Kill() error {
	return all(c.Nodes, (*Redis).Kill)
}

// Start restarts the nodes that do not run, and returns when the cluster can be used.
func (c *Cluster) Start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	err := all(c.Nodes, func(r *Redis) error {
		if r.Running() {
			return nil
		}
		return r.Start(ctx)
	})
	if err != nil {
		return err
	}
	return c.Wait(ctx)
}

// all applies do to several servers at once.
func all(servers []*Redis, do func(r *Redis) error) error {
	errs := make(chan error)
	for _, r := range servers {
		go func() { errs <- do(r) }()
	}
	var err error
	for range servers {
		err = errors.Join(err, <-errs)
	}
	return err
}
