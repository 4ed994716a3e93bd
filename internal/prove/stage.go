package prove

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/local/natslog"
	"posthaste/sql"
)

// The servers, as links and reports name them.
const (
	serverPostgres = "postgres"
	serverRedis    = "redis"
	serverNats     = "nats"
)

// sinkNats is the value of --sink that makes relays publish to JetStream.
const sinkNats = "nats"

// stage is the environment of a campaign: the servers, with a link between each server and each process that faults
// disturb. The campaign itself connects without these links.
type stage struct {
	dir string
	log *slog.Logger

	// postgres is the URL of the campaign's database, server the address of Postgres.
	postgres, server string
	// redis has the address of Redis.
	redis *redis.Options
	// nats is the URL of NATS; nil if events are published to Redis.
	nats *url.URL
	// signs is true if the campaign makes the stream of signs on external servers.
	signs bool
	// remove removes everything that the campaign created on external servers; nil if it started its own servers.
	remove func(ctx context.Context) error

	// The following fields are only set if the campaign started its own servers.
	servers *local.Servers
	// rd are two Redis servers: the one at index at leads. The other one is its replica, connected through replication.
	rd          [2]*local.Redis
	at          int
	replication *link.Link
	// links has the links by name, for example "relay-0 to redis".
	links map[string]*link.Link
	// own and ownPostgres are the links that the campaign itself uses for Redis and for Postgres: they follow a
	// failover and are never disturbed. On external servers, the campaign connects to Postgres without a link.
	own, ownPostgres *link.Link

	pool   *pgxpool.Pool
	client *redis.Client
	// streams has the events. With NATS, Redis is that of the guard and of the credits only.
	streams streams
}

// openStage starts new servers for a stage, or makes one of the configured servers.
func openStage(ctx context.Context, c *app.Config, o Options, log *slog.Logger) (s *stage, err error) {
	s = &stage{log: log, links: map[string]*link.Link{}}
	if o.External {
		if s.dir, err = os.MkdirTemp(o.Dir, "posthaste-prove-"); err == nil {
			err = s.borrow(ctx, c, o)
		}
	} else {
		err = s.start(ctx, o)
	}
	if err == nil {
		err = s.connect(ctx)
	}
	return s, err
}

func (s *stage) start(ctx context.Context, o Options) (err error) {
	s.servers, err = local.Open(ctx, local.ServersOptions{
		Name: "prove", Dir: o.Dir, PGBin: o.PGBin, RedisBin: o.RedisBin, Nats: o.Sink == sinkNats,
		NatsBin: o.NatsBin,
		Settings: []string{
			"max_prepared_transactions=10", "max_wal_size=2GB", "max_slot_wal_keep_size=1GB", "shared_buffers=128MB",
		},
	})
	if err != nil {
		return err
	}
	s.dir, s.rd[0] = s.servers.Dir, s.servers.Redis
	if s.replication, err = link.New(ctx, s.rd[0].Addr()); err != nil {
		return err
	}
	dir, err := s.servers.Folder("redis-1")
	if err != nil {
		return err
	}
	if s.rd[1], err = local.StartRedis(ctx, s.servers.RedisBin, dir, s.replicaOf()); err != nil {
		return err
	}
	s.postgres, s.server = s.servers.Postgres.URL("postgres"), s.servers.Postgres.Addr()
	if s.ownPostgres, err = link.New(ctx, s.server); err != nil {
		return err
	}
	s.postgres = s.postgresURL(s.ownPostgres)
	s.redis = &redis.Options{Addr: s.rd[0].Addr()}
	if s.servers.Nats != nil {
		s.nats, err = url.Parse(s.servers.Nats.URL())
	}
	return err
}

// connect migrates the database and opens the campaign's own connections.
func (s *stage) connect(ctx context.Context) (err error) {
	if _, err := sql.Migrate(ctx, s.postgres, "public", s.log); err != nil {
		return err
	}
	if s.pool, err = openPool(ctx, s.postgres, 8, map[string]string{"application_name": "prove"}); err != nil {
		return err
	}
	if s.own, err = link.New(ctx, s.redis.Addr); err != nil {
		return err
	}
	o := *s.redis
	o.Addr, o.Protocol = s.own.Addr(), 2
	s.client = redis.NewClient(&o)
	s.streams = redisStreams{s.client}
	if s.nats != nil {
		s.streams, err = natslog.Open(s.nats.String())
	}
	return err
}

// openPool returns a pool of so many connections with parameters.
func openPool(ctx context.Context, url string, size int32, parameters map[string]string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("parse the URL of Postgres") // the error may quote the URL
	}
	config.MaxConns, config.ConnConfig.ConnectTimeout = size, 5*time.Second
	maps.Copy(config.ConnConfig.RuntimeParams, parameters)
	return pgxpool.NewWithConfig(ctx, config)
}

// replicaOf returns the configuration line that makes a server a replica, through the link between the two.
func (s *stage) replicaOf() string {
	return "replicaof " + strings.Replace(s.replication.Addr(), ":", " ", 1)
}

// leading returns the Redis server that all links lead to.
func (s *stage) leading() *local.Redis { return s.rd[s.at] }

// link returns the link between a process and a server. It opens the link at the first call.
func (s *stage) link(ctx context.Context, who, server string) (*link.Link, error) {
	name := who + " to " + server
	if l := s.links[name]; l != nil {
		return l, nil
	}
	upstream := s.redis.Addr
	switch server {
	case serverPostgres:
		upstream = s.server
	case serverNats:
		upstream = s.nats.Host
	}
	l, err := link.New(ctx, upstream)
	if err == nil {
		s.links[name] = l
	}
	return l, err
}

// linksTo returns the links between processes and a server.
func (s *stage) linksTo(server string) (list []*link.Link) {
	for name, l := range s.links {
		if strings.HasSuffix(name, " to "+server) {
			list = append(list, l)
		}
	}
	return list
}

func (s *stage) postgresURL(l *link.Link) string {
	u, err := url.Parse(s.postgres)
	if err != nil {
		panic("the URL of Postgres was parsed before") // the error would quote its password
	}
	u.Host = l.Addr()
	return u.String()
}

func (s *stage) redisURL(l *link.Link) string {
	u := url.URL{Scheme: "redis", Host: l.Addr(), Path: "/" + strconv.Itoa(s.redis.DB)}
	if s.redis.TLSConfig != nil {
		u.Scheme = "rediss"
	}
	if s.redis.Password != "" || s.redis.Username != "" {
		u.User = url.UserPassword(s.redis.Username, s.redis.Password)
	}
	return u.String()
}

// failOver makes the replica the leading server, for all links at once.
func (s *stage) failOver(ctx context.Context) error {
	s.at = 1 - s.at
	promoted := redis.NewClient(&redis.Options{Addr: s.leading().Addr(), Protocol: 2})
	defer promoted.Close()
	if err := promoted.ReplicaOf(ctx, "NO", "ONE").Err(); err != nil {
		return fmt.Errorf("promote the replica: %w", err)
	}
	for _, l := range append(s.linksTo(serverRedis), s.own, s.replication) {
		l.To(s.leading().Addr())
	}
	return nil
}

// follow starts the previous leading server as a replica of the other one.
func (s *stage) follow(ctx context.Context) error { return s.rd[1-s.at].Start(ctx, s.replicaOf()) }

// restart starts the leading server again. It leads even if it was a replica before.
func (s *stage) restart(ctx context.Context) error { return s.leading().Start(ctx, "replicaof no one") }

// config returns the settings of a process for its servers, as environment.
func (s *stage) config(ctx context.Context, who string, c app.Config) ([]string, error) {
	pg, err := s.link(ctx, who, serverPostgres)
	if err != nil {
		return nil, err
	}
	rd, err := s.link(ctx, who, serverRedis)
	if err != nil {
		return nil, err
	}
	// In the environment, because all users of the machine can read a command line.
	env := []string{
		"POSTHASTE_POSTGRES_URL=" + s.postgresURL(pg), "POSTHASTE_REDIS_URL=" + s.redisURL(rd),
		"POSTHASTE_RELAY_NAME=" + c.RelayName, "POSTHASTE_LOG_FORMAT=json",
	}
	if s.nats != nil && !strings.HasPrefix(who, "serve") {
		l, err := s.link(ctx, who, serverNats)
		if err != nil {
			return nil, err
		}
		u := *s.nats
		u.Host = l.Addr()
		env = append(env, "POSTHASTE_SINK_URL="+u.String())
	}
	if s.remove != nil {
		// Channels are shared by all databases of Redis: clients of another database may subscribe to them.
		env = append(env, "POSTHASTE_PUBSUB=off")
	}
	if s.redis.TLSConfig != nil {
		env = append(env, "POSTHASTE_REDIS_SKIP_VERIFY=on")
	}
	return env, nil
}

// close stops the servers and removes everything that was created. The error names the objects that could not be
// removed from external servers.
func (s *stage) close(ctx context.Context) (err error) {
	if s.pool != nil {
		s.pool.Close()
	}
	if s.remove != nil {
		err = s.remove(ctx)
	}
	if s.client != nil {
		_ = s.client.Close()
	}
	if l, is := s.streams.(*natslog.Log); is && l != nil {
		l.Close()
	}
	for _, l := range s.links {
		l.Close()
	}
	for _, l := range []*link.Link{s.own, s.ownPostgres, s.replication} {
		if l != nil {
			l.Close()
		}
	}
	if s.rd[1] != nil {
		_ = s.rd[1].Kill()
	}
	s.servers.Close()
	if s.dir != "" {
		_ = os.RemoveAll(s.dir)
	}
	return err
}
