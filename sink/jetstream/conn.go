package jetstream

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/failpoint"
	"posthaste/outbox"
)

// conn is a connection to one process of a server. It never reconnects, and it sends nothing again: a message that was
// buffered for another process could arrive after its sender has given it up.
type conn struct {
	nc *nats.Conn
	// server is the name of the process, or of its cluster.
	server string
	// ended ends with the connection, so that requests do not wait for a process that has gone.
	ended context.Context //nolint:containedctx // its end is that of the connection
	denials
}

// apiRoot is what subjects of the JetStream API begin with, without a domain.
const apiRoot = "$JS.API."

// dial connects. The caller's options come first, so they cannot turn reconnecting on.
func dial(ctx context.Context, o Options) (*conn, error) {
	ended, cancel := context.WithCancel(context.WithoutCancel(ctx))
	timeout := callTimeout
	if d, ok := ctx.Deadline(); ok {
		timeout = min(timeout, max(time.Until(d), time.Millisecond))
	}
	c := &conn{ended: ended, denials: denials{
		api: apiRoot, waiting: map[*wait]struct{}{}, unheard: map[string]*DeniedError{},
	}}
	if o.Domain != "" {
		c.api = "$JS." + o.Domain + ".API."
	}
	opts := append([]nats.Option{nats.Name("posthaste")}, o.Connection...)
	opts = append(opts, nats.NoReconnect(), nats.ReconnectBufSize(-1), nats.Timeout(timeout),
		nats.ClosedHandler(func(*nats.Conn) { cancel() }), nats.ErrorHandler(c.heard))
	nc, err := nats.Connect(o.URL, opts...)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("connect to nats: %w", err)
	}
	c.nc, c.server = nc, nc.ConnectedServerId()
	// The processes of a cluster share the streams, and a client may be connected to any of them.
	if name := nc.ConnectedClusterName(); name != "" {
		c.server = "cluster " + name
	}
	if o.Domain != "" {
		c.server = "domain " + o.Domain
	}
	return c, nil
}

// bounded makes a request on subject. It ends with ctx, with the connection, after callTimeout, and when the server
// denies it.
func (c *conn) bounded(ctx context.Context, subject string, request func(ctx context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stop := context.AfterFunc(c.ended, cancel)
	defer stop()
	bounded, end := c.waits(bounded, subject)
	defer end()
	failpoint.Before(subject)
	err := request(bounded)
	failpoint.After(subject)
	var denied *DeniedError
	switch {
	case err == nil:
	case errors.As(context.Cause(bounded), &denied):
		return denied
	case c.ended.Err() != nil && ctx.Err() == nil:
		return nats.ErrConnectionClosed
	}
	return err
}

func (c *conn) request(ctx context.Context, m *nats.Msg) (reply *nats.Msg, err error) {
	err = c.bounded(ctx, m.Subject, func(ctx context.Context) (err error) {
		reply, err = c.nc.RequestMsgWithContext(ctx, m)
		return err
	})
	return reply, err
}

// unanswered adds the remedy to the error of a request that had no answer in time, or that no leader could take.
func unanswered(err error) error {
	if !errors.Is(err, context.DeadlineExceeded) && !hasCode(err, codeUnavailable) {
		return err
	}
	return fmt.Errorf("%w%sif nats-server is a cluster, start its nodes that are down, and restart those whose disk "+
		"was full when it has space: it needs more than half of them, and of the replicas of each stream", err,
		outbox.RemedyMark)
}

// open returns the connection, and makes another one if it has ended. ErrMoved if that is of another process than the
// bound one.
func (s *Sink) open(ctx context.Context) (_ *conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil || !s.conn.nc.IsConnected() {
		if s.conn != nil {
			s.conn.nc.Close()
		}
		if s.conn, err = dial(ctx, s.o); err != nil {
			return nil, err
		}
	}
	if s.bound != "" && s.conn.server != s.bound {
		return nil, outbox.ErrMoved
	}
	return s.conn, nil
}

// Close closes the connection.
func (s *Sink) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		s.conn.nc.Close()
		s.conn = nil
	}
}

// apiLevel is that of NATS 2.12, the first with atomic batches.
const apiLevel = 2

// Ready returns nil if JetStream answers and has atomic batches. It writes nothing.
func (s *Sink) Ready(ctx context.Context) error {
	_, err := s.ready(ctx)
	if errors.Is(err, outbox.ErrMoved) {
		return nil // the relay adopts again
	}
	return err
}

// Bind implements stream.Sink. It refuses servers that have no atomic batches.
func (s *Sink) Bind(ctx context.Context, _ bool) (string, error) {
	s.Release()
	server, err := s.ready(ctx)
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.bound = server
	}
	return server, err
}

func (s *Sink) ready(ctx context.Context) (server string, err error) {
	c, err := s.open(ctx)
	if err != nil {
		return "", err
	}
	var account js.AccountInfo
	err = c.call(ctx, "INFO", struct{}{}, &account)
	if errors.Is(err, nats.ErrNoResponders) {
		return "", fmt.Errorf("nats has no JetStream for this account: %w%sstart nats-server with -js, enable "+
			"JetStream for the account, and check the domain of --sink-url; if its disk was full, free space and "+
			"restart it", err, outbox.RemedyMark)
	}
	if err != nil {
		return "", unanswered(fmt.Errorf("ask for JetStream: %w", err))
	}
	if account.API.Level < apiLevel {
		return "", fmt.Errorf("nats-server %s has no atomic batches%srun nats-server 2.12 or later",
			c.nc.ConnectedServerVersion(), outbox.RemedyMark)
	}
	if s.o.Replicas > 1 && s.o.Domain == "" && c.nc.ConnectedClusterName() == "" {
		return "", s.unplaced(errors.New("it is in no cluster"))
	}
	return c.server, nil
}

// unplaced returns why the servers keep fewer copies of a stream than configured.
func (s *Sink) unplaced(err error) error {
	return fmt.Errorf("nats-server cannot keep %d copies of a stream: %w%slower --sink-replicas, or run that many "+
		"servers with JetStream in a cluster", s.o.Replicas, err, outbox.RemedyMark)
}

// Release implements stream.Sink.
func (s *Sink) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bound = ""
}

// ParseURL returns the options in addresses of servers, which are separated by commas. Their parameters name files with
// credentials, creds=FILE, or with a seed, nkey=FILE, and the domain of JetStream, domain=NAME.
func ParseURL(addresses string) (o Options, err error) {
	var list []string
	for _, address := range strings.Split(addresses, ",") {
		u, err := url.Parse(strings.TrimSpace(address))
		if err != nil || !slices.Contains([]string{"nats", "tls"}, u.Scheme) || u.Host == "" {
			return o, errors.New("an address is nats://host:port or tls://host:port")
		}
		for name, values := range u.Query() {
			switch name {
			case "creds":
				o.Connection = append(o.Connection, nats.UserCredentials(values[0]))
			case "nkey":
				option, err := nats.NkeyOptionFromSeed(values[0])
				if err != nil {
					return o, fmt.Errorf("the seed of nkey: %w", err)
				}
				o.Connection = append(o.Connection, option)
			case "domain":
				if o.Domain = values[0]; o.Domain == "" || strings.ContainsAny(o.Domain, ".*> \t") {
					return o, errors.New("a domain is one token of a subject")
				}
			default:
				return o, fmt.Errorf("parameters of an address are creds, nkey and domain, not %s", name)
			}
		}
		u.RawQuery = ""
		list = append(list, u.String())
	}
	o.URL = strings.Join(list, ",")
	return o, nil
}
