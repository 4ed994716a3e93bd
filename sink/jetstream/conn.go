package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
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
	// api is what subjects of the API begin with. A server that has the domain replaces it by apiRoot, and then checks
	// the rights.
	api string
	// waiting has the requests that wait for an answer, as *wait. unheard has the denials of messages for which no
	// request waited, by their subject without its last token.
	waiting, unheard sync.Map
}

// wait is a request that waits for an answer.
type wait struct {
	subject string
	refuse  context.CancelCauseFunc
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
	c := &conn{ended: ended, api: apiRoot}
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
	switch cluster := nc.ConnectedClusterName(); {
	case o.Domain != "":
		c.server = "domain " + o.Domain
	case cluster != "":
		c.server = "cluster " + cluster
	}
	return c, nil
}

// bounded makes a request on subject. It ends with ctx, with the connection, after callTimeout, and when the server
// denies it.
func (c *conn) bounded(ctx context.Context, subject string, request func(ctx context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	defer context.AfterFunc(c.ended, cancel)()
	bounded, refuse := context.WithCancelCause(bounded)
	defer refuse(nil)
	w := &wait{subject, refuse}
	c.waiting.Store(w, nil)
	defer c.waiting.Delete(w)
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
func (s *Sink) Bind(ctx context.Context) (string, error) {
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
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return "", fmt.Errorf("nats has no JetStream for this account: %w%sstart nats-server with -js, enable "+
			"JetStream for the account, and check the domain of --sink-url; if its disk was full, free space and "+
			"restart it", err, outbox.RemedyMark)
	case err != nil:
		return "", unanswered(fmt.Errorf("ask for JetStream: %w", err))
	case account.API.Level < apiLevel:
		return "", fmt.Errorf("nats-server %s has no atomic batches%srun nats-server 2.12 or later",
			c.nc.ConnectedServerVersion(), outbox.RemedyMark)
	case s.o.Replicas > 1 && s.o.Domain == "" && c.nc.ConnectedClusterName() == "":
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

// DeniedError means that the server does not allow the user to publish or to subscribe to a subject.
type DeniedError struct {
	// Action is publish or subscribe, and Grant the subjects for which the user needs that right.
	Action, Subject, Grant string
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("the user of NATS has no permission to %s to %q%sgrant it %s on %q",
		e.Action, e.Subject, outbox.RemedyMark, e.Action, e.Grant)
}

// Unwrap makes the error one of the client's.
func (*DeniedError) Unwrap() error { return nats.ErrPermissionViolation }

var violation = regexp.MustCompile(`Violation for (Publish|Subscription) to "([^"]+)"`)

// heard handles an error that the server has reported. It reports a denial on the connection and does not answer the
// request.
func (c *conn) heard(nc *nats.Conn, _ *nats.Subscription, err error) {
	found := violation.FindStringSubmatch(err.Error())
	if !errors.Is(err, nats.ErrPermissionViolation) || found == nil {
		return
	}
	e := &DeniedError{Action: "publish", Subject: found[2]}
	first, _, _ := strings.Cut(e.Subject, ".")
	e.Grant = first + ".>"
	if api, _, ok := strings.Cut(e.Subject, ".API."); ok && first == "$JS" {
		e.Grant = api + ".API.>"
	}
	all := found[1] == "Subscription" // to the answers
	if all {
		e.Action = "subscribe"
		defer nc.Close() // the client does not subscribe again
	}
	heard := false
	for key := range c.waiting.Range {
		w := key.(*wait)
		if all || w.subject == e.Subject || strings.Replace(w.subject, c.api, apiRoot, 1) == e.Subject {
			w.refuse(e)
			heard = true
		}
	}
	if !heard {
		c.unheard.Store(e.Subject[:strings.LastIndexByte(e.Subject, '.')+1], e)
	}
}

// take returns the denial of a message on a subject that begins with parent; nil without one.
func (c *conn) take(parent string) error {
	if e, ok := c.unheard.LoadAndDelete(parent); ok {
		return e.(*DeniedError)
	}
	return nil
}

// SignStream has the signs. No stream of the outbox can have its name. The server removes signs in time.
const SignStream = "POSTHASTE--ALIVE"

const signSubject = "posthaste-alive."

// Alive implements stream.Sink.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	other *outbox.Sign, err error,
) {
	err = s.on(ctx, "sign in", SignStream, func(r *remote) error {
		r.name = SignStream
		return repeated(ctx, conflicts, func() (err error) {
			other, err = s.alive(ctx, r, signSubject+source.String(), m, before)
			return err
		})
	})
	return other, err
}

func (s *Sink) alive(ctx context.Context, r *remote, subject string, m outbox.Member, before *outbox.Sign) (
	other *outbox.Sign, err error,
) {
	last, err := r.get(ctx, getRequest{LastFor: subject})
	if err == nil && last == nil { // the stream may not exist
		last = new(message)
		err = s.make(ctx, r.conn, js.StreamConfig{
			Name: SignStream, Subjects: []string{signSubject + "*"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true,
			MaxAge: outbox.TwinLasts,
		})
	}
	if err != nil {
		return nil, err
	}
	sign, lasts := outbox.Sign{Member: m, Text: uuid.NewString()}, outbox.SignLasts
	if last.Seq > 0 {
		var theirs outbox.Sign
		if err := json.Unmarshal(last.Data, &theirs); err != nil {
			return nil, err
		}
		if theirs.ID != m.ID && theirs.Server != m.Server {
			if before == nil || before.Text == theirs.Text {
				return &theirs, nil
			}
			other, sign, lasts = &theirs, theirs, outbox.TwinLasts
		}
	}
	next := expecting(subject, last.Seq, sign)
	next.Header.Set(js.MsgTTLHeader, lasts.String())
	if _, err := r.commit(ctx, next); err != nil {
		return nil, err
	}
	return other, nil
}
