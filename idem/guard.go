package idem

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/singleflight"

	"posthaste/internal/redisurl"
)

const (
	DefaultLease = 15 * time.Second
	// TTL is how long the record of a finished operation stays. While the server's memory is short, it stays for a
	// lease only (see Guard.Short).
	TTL = 24 * time.Hour
	// hold is how long the record of an attempt that never ended stays.
	hold = time.Hour
)

// patience is how long a request waits for another attempt before it queries the database.
const patience = 250 * time.Millisecond

type Options struct {
	// Redis is the guard's server; see NewClient for the options it needs. nil: every request is degraded.
	Redis redis.UniversalClient
	// Database names the database that the work commits to. Each incarnation of it has records of its own, so that a
	// record never confirms what another database has, or what this one has lost. nil: all records are of one database
	// that loses nothing.
	Database Database
	// Lease is how long an attempt owns its key without a heartbeat. The work must have a shorter deadline. Zero:
	// DefaultLease.
	Lease time.Duration
	// Routes are the values of Request.Route; they are the route label of the metrics.
	Routes []string
	// Logger gets state changes. nil: discard.
	Logger *slog.Logger
	// Registerer gets the metrics. nil: none.
	Registerer prometheus.Registerer
}

// Database knows the incarnation of the database that the work commits to: a name, which changes whenever the database
// may have lost commits. Both functions return "" if it is not known, and requests are then degraded.
type Database interface {
	// Last returns the incarnation that was seen last. Each request calls it.
	Last(ctx context.Context) string
	// Confirmed returns the incarnation that the database has now, or had a moment ago. Requests call it before a
	// record decides them. While the database does not answer, it returns the last one.
	Confirmed(ctx context.Context) string
}

// Guard decides which of the requests with one key does the work. It is safe for concurrent use.
type Guard struct {
	client redis.UniversalClient
	// database is nil if records are not distinguished.
	database Database
	// nodes are the nodes by address; there are never more than a cluster has had. "" is the one server, and of a
	// cluster the question where a key is.
	nodesMu sync.Mutex
	nodes   map[string]*node
	scripts map[string]*redis.Script
	timeout time.Duration // of one call; callTimeout except in tests
	lease   time.Duration
	log     *slog.Logger
	metrics *metrics
	cache   *cache
	flights flights
	// lookups are the running queries of the database. Concurrent requests for one operation share a query.
	lookups singleflight.Group
	memory  memory
}

// New returns a guard. It does no I/O.
func New(o Options) *Guard {
	return &Guard{
		client: o.Redis, database: o.Database, scripts: loadScripts(),
		log:     cmp.Or(o.Logger, slog.New(slog.DiscardHandler)).With("component", "idem"),
		metrics: newMetrics(o.Registerer, o.Routes), timeout: callTimeout, nodes: map[string]*node{},
		lease: cmp.Or(o.Lease, DefaultLease), cache: newCache(cacheSize, cacheTTL),
		flights: flights{m: map[Key]*flight{}},
	}
}

// Request is one attempt at an operation.
type Request struct {
	Key         Key
	Fingerprint Fingerprint
	// Route is the metrics label, one of Options.Routes.
	Route string
	// Wait is how long to wait for another attempt that is under way. Zero: not at all.
	Wait time.Duration
	// Lookup finds the finished operation of this key in the database. It is used where the guard's own record does not
	// decide: for a pending record with another fingerprint (another client may have taken the key after Redis lost
	// it), and at the end of Wait. nil: such a request is Busy.
	Lookup func(ctx context.Context) (Found, error)

	// in is the incarnation that the request is decided in; Key is then that of the record.
	in string
}

// Found is the database's state of a key.
type Found struct {
	// Exists reports that the operation was committed.
	Exists bool
	// Matches reports that it was the same command.
	Matches bool
	Record  Record
}

// Record points to the result of a finished operation.
type Record struct {
	// Status is the HTTP status of the response.
	Status int
	// Ref identifies the result, for example an order id. It must not contain '|' or a newline.
	Ref string
	// Payload is the data, in addition to the request, that rendering the response needs: a few bytes.
	Payload string
	// Incarnation is where the operation was committed, as Options.Database names it. Commit publishes the record only
	// if that is where the request was decided. "": it is. Records in Redis do not have it.
	Incarnation string
}

// Outcome is the result of Begin.
type Outcome int

const (
	// Proceed: do the work. Decision.Ticket is set.
	Proceed Outcome = iota
	// Replay: the operation is finished. Decision.Record is set, and a degraded Decision.Ticket, for work whose result
	// the database has no more.
	Replay
	// Busy: another attempt is in progress. Decision.RetryAfter is set.
	Busy
	// Mismatch: the key belongs to another command, finished or certain to be. Retrying cannot help.
	Mismatch
)

// Decision is the answer of Begin.
type Decision struct {
	Outcome Outcome
	Ticket  *Ticket
	Record  Record
	// RetryAfter is when to try again: at most a second, because an attempt may end long before its lease does.
	RetryAfter time.Duration
}

// Begin decides about one attempt. Redis trouble is no error: the decision is then Proceed with a degraded ticket, and
// the database arbitrates. Errors are those of ctx, which ended while waiting, and of Request.Lookup.
func (g *Guard) Begin(ctx context.Context, r Request) (Decision, error) {
	w := waiter{g: g, deadline: time.Now().Add(r.Wait)}
	in := ""
	if g.database != nil {
		in = g.database.Last(ctx)
	}
	for {
		d, err := g.decide(ctx, &w, r, in)
		if err != nil {
			return Decision{}, err
		}
		if g.database != nil && (d.Outcome == Replay || d.Outcome == Mismatch) {
			if now := g.database.Confirmed(ctx); now != in {
				in = now
				continue
			}
		}
		if d.Outcome == Replay {
			d.Ticket = &Ticket{guard: g, key: r.Key.In(in), in: in, fp: r.Fingerprint}
		}
		if w.waited && d.outcome == OutcomeReplayRedis {
			d.outcome = OutcomeWaited
		}
		g.Count(r.Route, d.outcome)
		return d.Decision, nil
	}
}

// decide decides about one attempt in an incarnation.
func (g *Guard) decide(ctx context.Context, w *waiter, r Request, in string) (verdict, error) {
	r.in, r.Key = in, r.Key.In(in)
	if in == "" && g.database != nil {
		return g.degraded(&r, errUnusable), nil
	}
	w.r, w.asked, w.finished = &r, false, false
	attempt := newAttempt()
	for {
		d := g.acquire(ctx, &r, attempt)
		if d.Outcome != Busy {
			return d, nil
		}
		if decided, err := w.wait(ctx, &d); decided || err != nil {
			return d, err
		}
	}
}

// verdict is a Decision with internal state of Begin.
type verdict struct {
	Decision
	outcome   string
	leaseLeft time.Duration
	// contested: the record has another fingerprint. finished: it is a finished one.
	contested, finished bool
}

// acquire makes one call. It returns Busy if the outcome is not decided yet.
func (g *Guard) acquire(ctx context.Context, r *Request, attempt string) verdict {
	if rec, fp, ok := g.cache.get(r.Key); ok {
		if fp == r.Fingerprint.text() {
			return verdict{Decision: Decision{Outcome: Replay, Record: rec}, outcome: OutcomeReplayRedis}
		}
		return g.mismatch(r, "C", fp)
	}
	// Not cancelled with the client: a lost reply would leave a lease that no attempt works under.
	reply, err := g.eval(context.WithoutCancel(ctx), scriptAcquire, r.Key, r.Fingerprint.text(), attempt,
		g.lease.Milliseconds(), hold.Milliseconds())
	if err == nil {
		var v verdict
		if v, err = g.assess(r, reply); err == nil {
			return v
		}
	}
	return g.degraded(r, err)
}

func (g *Guard) assess(r *Request, reply []string) (verdict, error) {
	switch code := reply[0]; {
	case (code == "ACQUIRED" || code == "TAKEOVER") && len(reply) == 2:
		token, err := strconv.ParseInt(reply[1], 10, 64)
		if err != nil {
			return verdict{}, fmt.Errorf("parse a token: %w", err)
		}
		t := &Ticket{guard: g, key: r.Key, in: r.in, fp: r.Fingerprint, token: token}
		return verdict{Decision: Decision{Outcome: Proceed, Ticket: t}, outcome: strings.ToLower(code)}, nil
	case code == "REPLAY" && len(reply) == 3:
		rec, fp, err := parseRecord(reply[2])
		if err != nil {
			return verdict{}, err
		}
		g.cache.put(r.Key, fp, rec)
		return verdict{Decision: Decision{Outcome: Replay, Record: rec}, outcome: OutcomeReplayRedis}, nil
	case code == "BUSY" && len(reply) == 3:
		ms, err := strconv.ParseInt(reply[2], 10, 64)
		if err != nil {
			return verdict{}, fmt.Errorf("parse the rest of a lease: %w", err)
		}
		return busy(time.Duration(ms)*time.Millisecond, false), nil
	case code == "MISMATCH" && len(reply) == 3:
		return g.mismatch(r, reply[1], reply[2]), nil
	default: // CORRUPT, or a reply of a later version
		return verdict{}, fmt.Errorf("guard record is unusable: %s", code)
	}
}

// mismatch is final against a finished record, unless a later version wrote its fingerprint: then, and against a
// pending record, the database decides.
func (g *Guard) mismatch(r *Request, state, fp string) verdict {
	if state == "C" && (r.Lookup == nil || r.Fingerprint.comparable(fp)) {
		return verdict{Decision: Decision{Outcome: Mismatch}, outcome: OutcomeMismatch}
	}
	v := busy(g.lease, true)
	v.finished = state == "C"
	return v
}

func busy(left time.Duration, contested bool) verdict {
	return verdict{
		Decision:  Decision{Outcome: Busy, RetryAfter: min(left, time.Second)},
		outcome:   OutcomeBusy,
		leaseLeft: left + time.Millisecond,
		contested: contested,
	}
}

func (g *Guard) degraded(r *Request, err error) verdict {
	if !errors.Is(err, errUnusable) {
		g.log.Warn("guard goes without redis for a request", "err", redisurl.WithAuthRemedy(err))
	}
	t := &Ticket{guard: g, key: r.Key, in: r.in, fp: r.Fingerprint}
	return verdict{Decision: Decision{Outcome: Proceed, Ticket: t}, outcome: OutcomeDegraded}
}

// Count counts an outcome that only the caller knows (OutcomeReplayPG, OutcomeUnknown, OutcomeRejected), in addition to
// the one that Begin counted.
func (g *Guard) Count(route, outcome string) {
	g.metrics.requests.WithLabelValues(route, outcome).Inc()
}

// newAttempt returns an id that no other attempt on the same key has.
func newAttempt() string {
	var b [9]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// parseRecord reads C|fp|token|status|ref\npayload.
func parseRecord(s string) (rec Record, fp string, err error) {
	head, payload, _ := strings.Cut(s, "\n")
	f := strings.Split(head, "|")
	if len(f) != 5 || f[0] != "C" {
		return Record{}, "", errors.New("guard record is malformed")
	}
	status, err := strconv.Atoi(f[3])
	if err != nil {
		return Record{}, "", fmt.Errorf("guard record has no status: %w", err)
	}
	return Record{Status: status, Ref: f[4], Payload: payload}, f[1], nil
}
