package sink

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
)

// Server binds a client to the processes of Redis that it has met: one, or the masters of a cluster. A process that was
// restarted or took over, or whose dataset was replaced, may lack acknowledged events, so nothing is published there
// before the relay has compared its streams. This costs one check for each connection.
//
// A process is identified by its run id and the id of its replication history, which changes with a promotion. In a
// cluster each address has a process of its own. An address at which no master was met, such as a replica's, only gets
// commands about the cluster; no connection to it, however old, publishes. Slots may move between masters that were
// met, because their keys move with them.
type Server struct {
	// sentinels is set if Sentinels determine the server's address.
	sentinels bool

	mu  sync.Mutex
	any bool // every process is accepted
	// one is the only process. In a cluster, many has a member for each address, and masters are the addresses with
	// slots.
	one     member
	many    map[string]*member
	masters []string
	// names has the original names of processes whose history began again while they were bound.
	names map[instance]string
	// varying is what a proxy answers differently on each connection, so that it identifies no process.
	varying varying
}

// varying are the parts of an instance that cannot be relied on.
type varying struct{ run, history bool }

// of returns p without them.
func (v varying) of(p instance) instance {
	switch {
	case v.run && v.history || p.run == "" && p.history == "":
		return instance{}
	case v.run:
		p.run = ""
	}
	return p
}

// member is the state of one address. Server.mu guards it, except for server, which never changes.
type member struct {
	server *Server
	// bound is the process that was met; zero if it is unknown.
	bound instance
	met   bool
	// first is set if the first process that answers will be met.
	first bool
}

// instance is a running Redis and the history of its data. The zero value is an unknown one.
type instance struct {
	run, history string
	// fresh is set in a primary whose history does not continue another one, as a promoted replica's does. Its history
	// may begin again without any change of the data: with the first replica, or some time after the last one has left.
	fresh   bool
	replica bool
}

// String returns the name of the process, "" if it is unknown.
func (p instance) String() string {
	if p == (instance{}) {
		return ""
	}
	return p.run + "/" + p.history
}

// is reports whether p and o are the same process, as far as their run ids or, without those, their histories tell.
func (p instance) is(o instance) bool {
	if p.run == "" && o.run == "" {
		return p.history == o.history
	}
	return p.run == o.run
}

// errOther refuses a connection or a call.
var errOther = errors.New("this is another process of Redis, or it was restarted")

// onConnect checks each new connection.
func (m *member) onConnect(ctx context.Context, cn *redis.Conn) error {
	if m.server.sentinels {
		// The client also runs onConnect for connections to Sentinels.
		if mode, err := redisurl.ModeOf(ctx, cn); mode == "sentinel" || err != nil {
			return err
		}
	}
	id, err := identify(ctx, cn)
	if err != nil {
		return err
	}
	return m.meet(id)
}

// meet binds the first process if first is set, and refuses a process other than the bound one. At another address
// without a bound process it accepts the connection, because commands about the cluster are allowed; allowed refuses
// the others.
func (m *member) meet(p instance) error {
	m.server.mu.Lock()
	defer m.server.mu.Unlock()
	p = m.server.varying.of(p)
	switch {
	case m.server.any || !m.met && !m.first || m.bound == p:
		return nil
	case m.first:
		m.bound, m.met, m.first = p, true, false
		return nil
	case p.run != "" && m.bound.run == p.run && m.bound.fresh && p.fresh:
		m.server.names[p] = m.server.nameOf(m.bound)
		m.bound = p
		return nil
	}
	return errOther
}

// nameOf returns the name of a process: the original one, if only its history has begun again since. The caller holds
// s.mu.
func (s *Server) nameOf(p instance) string {
	if name, ok := s.names[p]; ok {
		return name
	}
	return p.String()
}

// allowed refuses commands to a node that was not met and will not be, except the harmless ones.
func (m *member) allowed(cmds ...redis.Cmder) error {
	m.server.mu.Lock()
	refuse := !m.server.any && !m.met && !m.first
	m.server.mu.Unlock()
	if refuse && slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return !harmless[c.Name()] }) {
		return errOther
	}
	return nil
}

// harmless are the commands that begin a connection or query the server's identity and cluster.
var harmless = map[string]bool{
	"hello": true, "auth": true, "client": true, "select": true, "readonly": true, "info": true, "cluster": true,
	"ping": true,
}

// DialHook implements redis.Hook.
func (*member) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (m *member) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := m.allowed(cmd); err != nil {
			return err
		}
		if _, view := cmd.(*redis.ClusterSlotsCmd); view {
			hctx, cancel := half(ctx)
			defer cancel()
			if err := wellConnected(hctx, next); err != nil {
				return err
			}
			return next(hctx, cmd)
		}
		return next(ctx, cmd)
	}
}

// wellConnected refuses a node's view of the cluster if the node does not reach most of the masters, because the others
// may have promoted a replica since. The client then queries another node.
func wellConnected(ctx context.Context, process redis.ProcessHook) error {
	cmd := redis.NewStringCmd(ctx, "cluster", "info")
	err := process(ctx, cmd)
	if redisurl.IsReply(err) {
		return nil // the user lacks the right, or a proxy does not support it
	}
	if err == nil && redisurl.Fields(cmd.Val())["cluster_state"] == "fail" {
		err = errCutOff
	}
	return err
}

// errCutOff means that a node's view of its cluster cannot be used.
const errCutOff = replyError("CLUSTERDOWN the node does not reach most of the masters, or slots have none")

// half returns a context with half of the remaining time.
func half(ctx context.Context) (context.Context, context.CancelFunc) {
	if d, ok := ctx.Deadline(); ok {
		return context.WithTimeout(ctx, time.Until(d)/2)
	}
	return ctx, func() {}
}

// ProcessPipelineHook implements redis.Hook.
func (m *member) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := m.allowed(cmds...); err != nil {
			for _, c := range cmds {
				c.SetErr(err)
			}
			return err
		}
		return next(ctx, cmds)
	}
}

// identify returns the process that answers; zero if INFO is refused.
func identify(ctx context.Context, c interface{ Pipeline() redis.Pipeliner }) (instance, error) {
	pipe := c.Pipeline()
	server, replication := pipe.Info(ctx, "server"), pipe.Info(ctx, "replication")
	_, sent := pipe.Exec(ctx)
	for _, cmd := range []*redis.StringCmd{server, replication} {
		err := cmd.Err()
		if err == nil && cmd.Val() == "" { // a refused connection has no error for each command
			err = sent
		}
		if err != nil && !redisurl.Refused(err) {
			return instance{}, err
		}
	}
	of := redisurl.Fields(replication.Val())
	p := instance{run: redisurl.Fields(server.Val())["run_id"], history: of["master_replid"]}
	if p.run == "" && p.history == "" {
		return instance{}, nil
	}
	role := of["role"]
	p.replica = role != "master" && role != ""
	p.fresh = role == "master" && strings.Trim(of["master_replid2"], "0") == ""
	return p, nil
}

// NewBoundClient returns the client that redis.NewUniversalClient makes of o, with the options of Configure, and the
// Server that binds it to the processes that Bind meets.
func NewBoundClient(o *redis.UniversalOptions) (redis.UniversalClient, *Server) {
	Configure(o)
	s := &Server{any: true, many: map[string]*member{}, names: map[instance]string{}, sentinels: o.MasterName != ""}
	s.one.server = s
	before := o.OnConnect
	watched := func(m *member) func(ctx context.Context, cn *redis.Conn) error {
		return func(ctx context.Context, cn *redis.Conn) error {
			if before != nil {
				if err := before(ctx, cn); err != nil {
					return err
				}
			}
			return m.onConnect(ctx, cn)
		}
	}
	if o.MasterName != "" || !o.IsClusterMode && len(o.Addrs) < 2 {
		o.OnConnect = watched(&s.one)
		return redis.NewUniversalClient(o), s
	}
	many := o.Cluster()
	many.NewClient = func(node *redis.Options) *redis.Client {
		m := s.member(node.Addr)
		node.OnConnect = watched(m)
		c := redis.NewClient(node)
		c.AddHook(m)
		return c
	}
	return redis.NewClusterClient(many), s
}

// member returns the state of an address.
func (s *Server) member(addr string) *member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at(addr)
}

// at is member for a caller that holds s.mu.
func (s *Server) at(addr string) *member {
	m := s.many[addr]
	if m == nil {
		m = &member{server: s}
		s.many[addr] = m
	}
	return m
}

// Bind implements stream.Sink.
func (s *Sink) Bind(ctx context.Context) (string, error) {
	name, err := s.bind(ctx)
	s.moved.Store(false)
	return name, s.failed("identify", "", err)
}

func (s *Sink) bind(ctx context.Context) (string, error) {
	if many, ok := s.o.Client.(*redis.ClusterClient); ok {
		return s.bindAll(ctx, many)
	}
	server := s.o.Server
	if server == nil {
		p, err := identify(ctx, s.o.Client)
		return p.String(), err
	}
	server.mu.Lock()
	one := &server.one
	one.bound, one.met, one.first, server.any = instance{}, false, true, false
	server.mu.Unlock()
	p, err := identify(ctx, s.o.Client)
	if err == nil {
		err = s.compare(ctx, p)
	}
	if err == nil {
		err = one.meet(p)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	return server.nameOf(server.varying.of(p)), err
}

// compare finds out whether other connections lead to p as well. Those of Sentinels lead to the present master.
func (s *Sink) compare(ctx context.Context, p instance) error {
	server := s.o.Server
	c, ok := s.o.Client.(*redis.Client)
	if !ok || server.sentinels {
		return nil
	}
	v, err := compare(ctx, c, p)
	server.mu.Lock()
	defer server.mu.Unlock()
	if v.run && !server.varying.run {
		s.log.WarnContext(ctx, "the connections to redis give different run ids: its restarts are noticed by its "+
			"replication id, or by missing events")
	}
	server.varying.run = server.varying.run || v.run
	server.varying.history = server.varying.history || v.history
	return err
}

// varies reports whether run ids identify no process.
func (s *Sink) varies() bool {
	if s.o.Server == nil {
		return false
	}
	s.o.Server.mu.Lock()
	defer s.o.Server.mu.Unlock()
	return s.o.Server.varying.run
}

// comparisons bounds the connections that compare makes.
const comparisons = 8

// compare makes connections until one has the identity of the one before it. After a failover, all new ones lead to the
// new server. So only identities that come back, or a third one, prove that the address has several at once.
func compare(ctx context.Context, c *redis.Client, first instance) (varying, error) {
	seen := []instance{first}
	for range comparisons {
		p, err := identifyAnew(ctx, c)
		if err != nil {
			return varying{}, err
		}
		if p.is(seen[len(seen)-1]) {
			if len(seen) == 1 {
				break
			}
			continue
		}
		if len(seen) > 1 {
			other := slices.ContainsFunc(seen, func(q instance) bool { return q.history != p.history })
			return varying{run: true, history: other || p.history == ""}, nil
		}
		seen = append(seen, p)
	}
	return varying{}, nil
}

// identifyAnew identifies the process that a new connection leads to.
func identifyAnew(ctx context.Context, c *redis.Client) (instance, error) {
	o := *c.Options()
	o.OnConnect, o.MaxRetries, o.PoolSize, o.PipelinePoolSize = nil, -1, 1, -1
	c = redis.NewClient(&o)
	defer c.Close()
	return identify(ctx, c)
}

// bindAll meets all current masters of a cluster. With a *outbox.StreamError it has met some, and meets each other one
// when that answers.
func (s *Sink) bindAll(ctx context.Context, many *redis.ClusterClient) (string, error) {
	server := s.o.Server
	if server != nil {
		server.mu.Lock()
		server.any, server.masters = false, nil
		for _, m := range server.many {
			m.bound, m.met, m.first = instance{}, false, false
		}
		server.mu.Unlock()
	}
	found, silent, err := masters(ctx, many)
	if err != nil && (len(found) == 0 || len(silent) == 0) {
		return "", err
	}
	if err != nil {
		err = &outbox.StreamError{Lost: true, Err: err}
	}
	if server == nil {
		return nameOf(found, instance.String), err
	}
	addrs, spares := slices.Sorted(maps.Keys(found)), s.spares(ctx, many, found)
	server.mu.Lock()
	defer server.mu.Unlock()
	name := nameOf(found, server.nameOf)
	maps.Copy(found, spares)
	for addr, p := range found {
		m := server.at(addr)
		m.bound, m.met = p, true
	}
	for _, addr := range silent {
		server.at(addr).first = true
	}
	server.masters = addrs
	return name, err
}

// errSilent is the error of a stream on a node that has not answered since the sink was bound.
var errSilent = errors.New("the node does not answer")

// silent reports whether the node of a stream has not answered since the sink was bound.
func (s *Sink) silent(ctx context.Context, stream string) bool {
	many, cluster := s.o.Client.(*redis.ClusterClient)
	if !cluster || s.o.Server == nil {
		return false
	}
	node, err := many.MasterForKey(ctx, stream)
	if err != nil {
		return false
	}
	m := s.o.Server.member(node.Options().Addr)
	m.server.mu.Lock()
	defer m.server.mu.Unlock()
	return m.first
}

// nameOf returns a hash of the names of all masters, of fixed length; "" if one is unknown.
func nameOf(found map[string]instance, name func(p instance) string) string {
	var names []string
	for _, p := range found {
		names = append(names, name(p))
	}
	slices.Sort(names)
	if len(names) == 0 || names[0] == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(names, "\n")))
	return "cluster/" + hex.EncodeToString(sum[:20])
}

// masters identifies all masters with slots, by address. With an error it returns those that have answered, and the
// silent ones if that is the only reason.
func masters(ctx context.Context, many *redis.ClusterClient) (found map[string]instance, silent []string, err error) {
	var mu sync.Mutex
	found = map[string]instance{}
	unlike := false
	err = many.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
		addr := c.Options().Addr
		ctx, cancel := half(ctx)
		defer cancel()
		p, err := identify(ctx, c)
		if err == nil && p.replica {
			err = errors.New("it is a replica")
		}
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			found[addr] = p
			return nil
		}
		silent = append(silent, addr)
		unlike = unlike || !silence[Class(err)]
		return redisurl.Node{Addr: addr}.Named(err)
	})
	if err == nil && len(found) == 0 {
		err = errors.New("the cluster has no masters")
	}
	if unlike {
		silent = nil
	}
	return found, silent, err
}

// silence are the classes of errors of a process that does not answer this client.
var silence = map[string]bool{"connection": true, "timeout": true, "noauth": true, "tls": true}

// spares returns the masters without slots that can be listed and answer. They may get slots, and then calls are
// redirected to them. Any other is met when it has a slot.
func (s *Sink) spares(ctx context.Context, many *redis.ClusterClient, known map[string]instance) map[string]instance {
	found := map[string]instance{}
	var some *redis.Client
	_ = many.ForEachMaster(ctx, func(_ context.Context, c *redis.Client) error {
		if c.Options().Addr == slices.Min(slices.Collect(maps.Keys(known))) {
			some = c
		}
		return nil
	})
	if some == nil {
		return nil
	}
	text, err := some.ClusterNodes(ctx).Result()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(text) {
		f := strings.Fields(line) // id, address, flags, and slots from the ninth on
		if len(f) != 8 || !slices.Contains(strings.Split(f[2], ","), "master") || strings.Contains(f[2], "fail") {
			continue
		}
		addr, _, _ := strings.Cut(f[1], "@")
		c := s.another(some, addr)
		if p, err := identify(ctx, c); err == nil && !p.replica {
			found[addr] = p
		}
		_ = c.Close()
	}
	return found
}

// another returns a client like c for another node, with the same checks. The caller closes it.
func (s *Sink) another(c *redis.Client, addr string) *redis.Client {
	o := *c.Options()
	o.Addr, o.NodeAddress, o.OnConnect, o.MaxRetries = addr, addr, nil, -1
	if s.o.Server == nil {
		return redis.NewClient(&o)
	}
	m := s.o.Server.member(addr)
	o.OnConnect = m.onConnect
	c = redis.NewClient(&o)
	c.AddHook(m)
	return c
}

// Release implements stream.Sink.
func (s *Sink) Release() {
	if server := s.o.Server; server != nil {
		server.mu.Lock()
		server.any = true
		clear(server.names) // the next binding names processes afresh
		server.mu.Unlock()
	}
	s.moved.Store(false)
}

// stays detects servers that have changed while their connections remained open: a primary that was a replica in
// between, and a master that has joined or left a cluster.
func (s *Sink) stays(ctx context.Context) error {
	server := s.o.Server
	if server == nil {
		return nil
	}
	many, ok := s.o.Client.(*redis.ClusterClient)
	if !ok {
		p, err := identify(ctx, s.o.Client)
		if err == nil && server.one.meet(p) != nil {
			s.moved.Store(true)
		}
		return err
	}
	found, _, err := masters(ctx, many)
	for addr, p := range found { // a node without an answer does not affect the others
		if server.member(addr).meet(p) != nil {
			s.moved.Store(true)
		}
	}
	if err != nil {
		return err
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if !server.any && !slices.Equal(server.masters, slices.Sorted(maps.Keys(found))) {
		s.moved.Store(true)
	}
	return nil
}
