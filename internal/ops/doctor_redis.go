package ops

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sink"
)

func (d *doctor) nats(ctx context.Context) {
	if err := d.config.NATS(ctx); err != nil {
		problem, remedy, _ := strings.Cut(err.Error(), outbox.RemedyMark)
		remedy = cmp.Or(remedy, "check --sink-url, and that nats-server listens there")
		d.fail("nats", remedy, "%s", problem)
		return
	}
	d.ok("nats", "JetStream answers, with atomic batches; its streams are not examined")
}

func (d *doctor) redis(ctx context.Context) {
	if d.config.Redis == nil {
		d.fail("redis", "correct --redis-url", "the URL cannot be parsed")
		return
	}
	d.redisTransport("redis", "redis-url", d.config.Redis)
	d.redisTransport("guard redis", "guard-redis-url", d.config.Guard)
	o := *d.config.Redis
	sink.Configure(&o)
	client := redis.NewUniversalClient(&o)
	defer client.Close()
	s := sink.New(sink.Options{Client: client, Durability: d.config.Durability})
	if err := s.Ready(ctx); err != nil {
		d.redisFails(SeverityFail, err)
		return
	}
	nodes, err := redisurl.Nodes(ctx, client)
	if err != nil {
		d.redisFails(SeverityFail, err)
		return
	}
	d.cluster(nodes)
	if unknown, err := s.Unknown(ctx); err == nil && len(unknown) > 0 {
		d.warn("redis unknown", "allow INFO and CONFIG GET, if the service can; else nothing to do", "%s",
			strings.Join(unknown, ". "))
	}
	d.eachNode(ctx, nodes, func(ctx context.Context, one *doctor, n redisurl.Node) { one.server(ctx, client, n) })
	d.balances(ctx, client)
	if !d.config.WriterOnly {
		if err := errors.Join(s.Permitted(ctx, d.names), d.foreign(ctx, client)); err != nil {
			d.fail("redis rights", sink.Remedy("noperm"), "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		if d.config.SharedStreams {
			d.sharing(ctx, client)
		}
	}
}

// cluster lists the nodes of a cluster.
func (d *doctor) cluster(nodes []redisurl.Node) {
	if len(nodes) == 1 && nodes[0].Addr == "" {
		return
	}
	masters := slices.IndexFunc(nodes, func(n redisurl.Node) bool { return n.Replica })
	if masters < 0 {
		masters = len(nodes)
	}
	replicas := len(nodes) - masters
	has := CountOf(int64(masters), "master") + " and " + CountOf(int64(replicas), "replica")
	if replicas < masters {
		d.warn("redis cluster", "give every master a replica",
			"%s: while a master without a replica is down, its streams are blocked, and others may be", has)
	} else {
		d.ok("redis cluster", "%s", has)
	}
}

// eachNode checks every server behind Redis. It reports a finding that all of them share once, others with the
// address.
func (d *doctor) eachNode(ctx context.Context, nodes []redisurl.Node,
	look func(ctx context.Context, one *doctor, n redisurl.Node),
) {
	found, _ := redisurl.Gather(ctx, nodes, func(ctx context.Context, n redisurl.Node) ([]Finding, error) {
		one := &doctor{config: d.config, desired: d.desired, names: d.names, shop: d.shop}
		look(ctx, one, n)
		return one.findings, nil
	})
	var order []Finding
	whose := map[Finding][]string{}
	for i, list := range found {
		for _, f := range list {
			if whose[f] == nil {
				order = append(order, f)
			}
			whose[f] = append(whose[f], nodes[i].Addr)
		}
	}
	// Findings are ordered by check, as the first node has them.
	rank := map[string]int{}
	for _, f := range order {
		if _, known := rank[f.Check]; !known {
			rank[f.Check] = len(rank)
		}
	}
	slices.SortStableFunc(order, func(a, b Finding) int { return rank[a.Check] - rank[b.Check] })
	for _, f := range order {
		addrs := whose[f]
		if len(addrs) < len(nodes) {
			f.Detail = "node " + strings.Join(addrs, ", ") + ": " + f.Detail
		}
		d.findings = append(d.findings, f)
	}
}

func (d *doctor) redisFails(severity string, err error) {
	problem, remedy := sink.Explain(err, strings.Join(d.config.Redis.Addrs, ","))
	if problem == "" {
		problem, remedy = OneLine(err), sink.Remedy(sink.Class(err))
	}
	d.add(severity, "redis", remedy, "%s", problem)
}

func (d *doctor) server(ctx context.Context, client redis.UniversalClient, n redisurl.Node) {
	info, err := redisurl.Info(ctx, n.Client, "server", "memory", "persistence")
	known := !redisurl.Refused(err)
	if err != nil && known {
		severity := SeverityFail
		if n.Replica {
			severity = SeverityWarn
		}
		d.redisFails(severity, err)
		return
	}
	can := "reachable and writable"
	if n.Replica {
		can = "a replica, reachable"
	}
	d.ok("redis", "version %s, %s, durability %s", cmp.Or(info["redis_version"], "unknown"), can, d.config.Durability)
	if known {
		d.redisMemory(info)
	}
	d.functions(ctx, n.Client)
	if !n.Replica {
		d.names = on(ctx, client, n, d.names)
		d.streams(ctx, n.Client, info)
	}
	if !known {
		return
	}
	if info["aof_enabled"] != "1" {
		d.warn("redis persistence", "set appendonly yes",
			"no append-only file: a restart of Redis loses what was published since its last snapshot")
	} else {
		config, _ := n.Client.ConfigGet(ctx, "appendfsync").Result() // may be refused
		d.ok("redis persistence", "append-only file, fsync %s", cmp.Or(config["appendfsync"], "unknown"))
	}
}

// on returns those of streams that are on a node.
func on(ctx context.Context, client redis.UniversalClient, n redisurl.Node, streams []string) []string {
	cluster, ok := client.(*redis.ClusterClient)
	if !ok {
		return streams
	}
	var here []string
	for _, name := range streams {
		if c, err := cluster.MasterForKey(ctx, name); err == nil && c == n.Client {
			here = append(here, name)
		}
	}
	return here
}

func (d *doctor) redisMemory(memory map[string]string) {
	if policy := memory["maxmemory_policy"]; unsafePolicy(policy) {
		d.warn("redis eviction", "set maxmemory-policy noeviction",
			"maxmemory-policy is %s: streams, gates and idempotency keys may vanish", policy)
	} else {
		d.ok("redis eviction", "noeviction")
	}
	limit, _ := strconv.ParseInt(strings.TrimSpace(memory["maxmemory"]), 10, 64)
	// 374 bytes an entry with a payload of 200 bytes, measured on Redis 7.0.
	need := d.config.StreamMaxlen * 374
	switch {
	case limit <= 0 || need <= 0:
	case limit < need:
		d.warn("redis memory", "raise maxmemory, or lower --stream-maxlen",
			"maxmemory %s is less than one stream of %s entries with 200-byte payloads takes (%s)",
			Size(limit), humanize.Comma(d.config.StreamMaxlen), Size(need))
	case limit/4*3 < need && d.config.Guard == nil: // see idem.Guard.Short
		d.warn("redis memory", "raise maxmemory, or give the guard a Redis of its own (--guard-redis-url)",
			"a stream of %s entries with 200-byte payloads takes %s, more than three quarters of maxmemory %s: "+
				"idempotency records will stay for seconds only, and replays come from the database",
			humanize.Comma(d.config.StreamMaxlen), Size(need), Size(limit))
	}
}
