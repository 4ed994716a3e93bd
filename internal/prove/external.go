package prove

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/secretfile"
	"posthaste/sink/jetstream"
	"posthaste/sql"
)

// warning describes the effects of a campaign on servers that it did not start.
func (c *campaign) warning(faults []*fault) string {
	streams := ""
	if c.options.Sink == sinkNats {
		streams = "makes the streams of its events in the NATS of --sink-url and deletes them at the end, "
	}
	return fmt.Sprintf("This makes a database posthaste_prove_… with a slot on the Postgres of --postgres-url, fills "+
		"the empty database of --redis-url, %sand writes %d events/s for %v. It kills, freezes and cuts off processes "+
		"of its own, ends sessions in its own database, drops its own slot, and keeps transactions open (%s). "+
		"Database, slot and everything in that database of Redis are removed at the end. Begin?", streams,
		c.options.Rate, c.options.Duration, namesOf(faults))
}

const oneRedis = "--external needs a --redis-url of one server, with a host and a port"

// errLeft means that the campaign could not remove everything that it created on the servers.
var errLeft = errors.New("left behind, remove it by hand")

// borrow makes a stage of the configured servers: a database with a new name in Postgres, and an empty database of
// Redis.
func (s *stage) borrow(ctx context.Context, c *app.Config, options Options) error {
	u, err := url.Parse(c.PostgresURL)
	if err != nil || u.Host == "" || strings.Contains(u.Host, ",") {
		return cli.Usage("--external needs a --postgres-url of the form postgres://user@host:port/database")
	}
	if err := withSecret(ctx, u); err != nil {
		return err
	}
	c.PostgresURL = u.String()
	if mode := u.Query().Get("sslmode"); mode == "verify-full" {
		return cli.Usage("--external puts links on loopback between posthaste and Postgres, which have no " +
			"certificate for its name: use sslmode=verify-ca")
	}
	s.server = u.Host
	if u.Port() == "" {
		s.server = net.JoinHostPort(u.Hostname(), "5432")
	}
	if err := s.borrowNats(ctx, c, options); err != nil {
		return err
	}
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	one, is := client.(*redis.Client)
	if !is {
		return cli.Usage(oneRedis)
	}
	o := one.Options()
	if _, _, err := net.SplitHostPort(o.Addr); err != nil { // a socket, or the name of a Sentinel master
		return cli.Usage(oneRedis)
	}
	if o.TLSConfig != nil && !c.RedisSkipVerify.On() {
		return cli.Usage("--external puts links on loopback between posthaste and Redis, which have no certificate " +
			"for its name: use --redis-skip-verify=on")
	}
	s.redis = &redis.Options{Addr: o.Addr, DB: o.DB, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig}
	if from := o.CredentialsProviderContext; from != nil { // a file
		if s.redis.Username, s.redis.Password, err = from(ctx); err != nil {
			return err
		}
	}
	switch n, err := client.DBSize(ctx).Result(); {
	case err != nil:
		return fmt.Errorf("ask redis: %w", err)
	case n > 0:
		return fmt.Errorf("database %d of Redis has %d keys: --external needs an empty one, such as %s", o.DB, n,
			"redis://host:port/9")
	}
	return s.createDatabase(ctx, c, *u)
}

// borrowNats takes the servers of --sink-url. They must not have the streams that the campaign makes.
func (s *stage) borrowNats(ctx context.Context, c *app.Config, o Options) (err error) {
	if o.Sink != sinkNats {
		return nil
	}
	address := c.SinkURL
	c.SinkURL = "" // the campaign's own client of Redis is not of streams
	s.nats, err = url.Parse(address)
	if err != nil || s.nats.Scheme != "nats" || s.nats.Port() == "" {
		return cli.Usage("--external --sink=nats needs a --sink-url of one server, nats://host:port: links on " +
			"loopback, which have no certificate for its name, lead there")
	}
	log, err := natslog.Open(address)
	if err != nil {
		return err
	}
	defer log.Close()
	if _, err = log.JS.AccountInfo(nats.Context(ctx)); err != nil {
		return fmt.Errorf("ask nats: %w", err)
	}
	_, err = log.JS.StreamInfo(jetstream.SignStream, nats.Context(ctx))
	s.signs = errors.Is(err, nats.ErrStreamNotFound)
	return eachStream(ctx, log, c, func(name string) error {
		return fmt.Errorf("nats has a stream %s: --external needs one without streams of that prefix", name)
	})
}

// eachStream calls do with every stream of JetStream that has the prefix.
func eachStream(ctx context.Context, log *natslog.Log, c *app.Config, do func(name string) error) (err error) {
	for name := range log.JS.StreamNames(nats.Context(ctx)) {
		if strings.HasPrefix(name, jetstream.StreamName(c.StreamPrefix)) {
			err = errors.Join(err, do(name))
		}
	}
	return err
}

// withSecret replaces the file of the password that an address of Postgres names, if it does, by the password: a
// campaign reads it once.
func withSecret(ctx context.Context, u *url.URL) error {
	q := u.Query()
	if !q.Has(secretfile.Parameter) {
		return nil
	}
	cfg, err := sql.PoolConfig(u.String(), "public", "prove")
	if err == nil {
		err = cfg.BeforeConnect(ctx, cfg.ConnConfig) // reads the file
	}
	if err != nil {
		return err
	}
	q.Del(secretfile.Parameter)
	u.RawQuery, u.User = q.Encode(), url.UserPassword(cfg.ConnConfig.User, cfg.ConnConfig.Password)
	return nil
}

// createDatabase creates the database and changes the settings to use it.
func (s *stage) createDatabase(ctx context.Context, c *app.Config, u url.URL) error {
	name := "prove_" + strings.ToLower(rand.Text()[:8])
	database := "posthaste_" + name
	admin := c.PostgresURL
	if err := onServer(ctx, admin, "CREATE DATABASE "+database); err != nil {
		return fmt.Errorf("create database %s: %w", database, err)
	}
	c.RelayName, c.Slot = name, "posthaste_"+name
	u.Path = "/" + database
	s.postgres = u.String()
	s.remove = func(ctx context.Context) error {
		conn, err := connect(ctx, admin)
		if err == nil {
			err = local.DropDatabase(ctx, conn, database)
			_ = conn.Close(ctx)
		}
		if s.client != nil {
			err = errors.Join(err, s.client.FlushDB(ctx).Err())
		}
		if log, is := s.streams.(*natslog.Log); is {
			err = errors.Join(err, eachStream(ctx, log, c, func(name string) error {
				return log.JS.DeleteStream(name, nats.Context(ctx))
			}))
			if s.signs {
				err = errors.Join(err, log.JS.DeleteStream(jetstream.SignStream, nats.Context(ctx)))
			}
		}
		if err != nil {
			return fmt.Errorf("database and slot %s, database %s of Redis, streams of NATS: %w: %w", database,
				strconv.Itoa(s.redis.DB), errLeft, err)
		}
		return nil
	}
	return nil
}
