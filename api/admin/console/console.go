// Package console is the page at /console/ on the admin listener. It shows the state of the pipeline and its problems,
// and offers the operator's actions.
//
// The page is embedded, loads no foreign resources, and calls only the endpoints below. Answers are JSON without
// payloads or secrets. Times are RFC 3339, durations in seconds, sizes in bytes.
//
//	GET  /console/              the page and its parts
//	GET  /console/runbook       the runbook; the id of a section is its name in lower case
//	GET  /console/api/session   {"csrf","kind","relay","source","prefix","holder","version"}: every POST
//	                            and PUT here needs csrf in the header X-Posthaste-Csrf
//	GET  /console/api/state     State: verdict, relay, Postgres, Redis, groups, rates
//	GET  /console/api/history   {"samples":[Sample…]}: the last 15 minutes, a sample a second, oldest first
//	GET  /console/api/dead      {"dead":[ops.Dead…],"total","as_of","error"}: at most 1,000 of the
//	                            relay and 1,000 of consumer groups
//	GET  /console/api/doctor    ops.Diagnosis and "as_of"; at most 2 s old
//	GET  /console/api/audit     {"entries":[audit.Entry…]}: the last 20 changes and refused changes
//	GET  /console/api/trace     ?id= and, if id is an idempotency key, &user=: {"steps":[ops.Step…],"error"}
//	PUT  /console/api/mode      {"mode":"auto"|"cdc"|"poll"} → {"desired"}
//	POST /console/api/dead/retry, /console/api/dead/drop   {"ids":[…]} → {"results":[{"what","error"}]}; at
//	                            most 200 ids
//
// PUT and POST also need the admin token as bearer token, if one is set. They work only through the admin listener,
// which audits them and refuses pages of other origins. (PUT /relay/mode and the other calls for curl need no csrf.)
//
// Cost: the console always takes one sample a second of this process' own metrics. It queries Postgres and Redis only
// for requests, over its own connections, each source with its own timeout, for all pages together about once a second,
// and usually for at most a tenth of the time. The page shows an unreachable source with the time of its last answer;
// the other sources continue.
package console

import (
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/semaphore"

	"posthaste/api/admin"
	"posthaste/internal/audit"
	"posthaste/internal/ops"
	"posthaste/internal/pause"
	"posthaste/internal/shared"
	"posthaste/outbox"
	"posthaste/relay"
)

//go:embed static
var files embed.FS

type Options struct {
	// Kind is "relay" or "serve".
	Kind string
	// Holder names this process (host:pid), Version its build.
	Holder, Version string
	// RelayName names the relay whose table is shown; StreamPrefix begins the names of its streams.
	RelayName, StreamPrefix string
	// Pool and Redis should be used by the console only, so that a slow page takes no connections from the work. Pool
	// needs room for Conns. The caller closes both.
	Pool  *pgxpool.Pool
	Redis redis.UniversalClient
	Slots outbox.Slots
	// Relay is the relay of this process, or nil.
	Relay *relay.Relay
	// Metrics is the registry of this process.
	Metrics prometheus.Collector
	Doctor  ops.DoctorOptions
	Logger  *slog.Logger
}

// Console serves the page and its data.
type Console struct {
	o       Options
	log     *slog.Logger
	mux     *http.ServeMux
	csrf    string
	ring    *ring
	watch   *watch
	traces  *semaphore.Weighted // bounds running traces
	entries shared.Look[[]audit.Entry]
	actions *semaphore.Weighted // bounds running actions
	doctor  shared.Look[diagnosis]
}

const (
	maxTraces  = 2
	maxActions = 2
)

// Conns is the maximum number of connections to Postgres in use: by the sources that need one, the audit, traces and
// actions. In a smaller pool, slow traces would make Postgres appear unresponsive.
const Conns = 2 + 1 + maxTraces + maxActions

// New returns a console. Its charts begin with Run.
func New(o Options) *Console {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Console{
		o: o, log: o.Logger.With("component", "console"), mux: http.NewServeMux(), csrf: rand.Text(),
		ring: newRing(o.Metrics), traces: semaphore.NewWeighted(maxTraces), actions: semaphore.NewWeighted(maxActions),
	}
	c.watch = newWatch(&c.o)
	c.doctor.Timeout, c.entries.Timeout = doctorTimeout, admin.CallTimeout
	c.doctor.Read = func(ctx context.Context) (diagnosis, error) {
		return diagnosis{Diagnosis: ops.Diagnose(ctx, c.o.Doctor), AsOf: time.Now().UTC()}, nil
	}
	c.entries.Read = func(ctx context.Context) ([]audit.Entry, error) {
		return audit.List(ctx, c.o.Pool, time.Time{}, entriesShown)
	}
	static, err := fs.Sub(files, "static")
	if err != nil {
		panic(err) // the build is broken
	}
	page := http.StripPrefix("/console", http.FileServerFS(static))
	c.mux.HandleFunc("GET /console/", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/console/" && strings.HasSuffix(r.URL.Path, "/") {
			http.NotFound(w, r) // no listings
			return
		}
		page.ServeHTTP(w, r)
	})
	c.mux.HandleFunc("GET /console/runbook", runbook())
	c.mux.HandleFunc("GET /console/api/session", c.session)
	c.mux.HandleFunc("GET /console/api/state", c.state)
	c.mux.HandleFunc("GET /console/api/history", c.history)
	c.mux.HandleFunc("GET /console/api/dead", c.dead)
	c.mux.HandleFunc("GET /console/api/doctor", c.diagnose)
	c.mux.HandleFunc("GET /console/api/audit", c.audit)
	c.mux.HandleFunc("GET /console/api/trace", c.trace)
	c.mux.HandleFunc("PUT /console/api/mode", c.guarded(c.setMode))
	c.mux.HandleFunc("POST /console/api/dead/retry", c.guarded(c.onDead(ops.RetryDead())))
	c.mux.HandleFunc("POST /console/api/dead/drop", c.guarded(c.onDead(ops.DropDead())))
	return c
}

func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	// No foreign, inline or framed content.
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "+
		"connect-src 'self'; font-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store") // the page and the script must be of the same build
	c.mux.ServeHTTP(w, r)
}

// Run adds a sample to the ring every second until ctx ends.
func (c *Console) Run(ctx context.Context) error {
	for pause.Tick(ctx, time.Second) == nil {
		now := time.Now()
		leads, shared := c.leads()
		c.ring.add(now, leads, shared, c.watch.look(now))
	}
	return nil
}

// leads reports whether the backlog gauges of this process are valid, and whether other relays may publish
// concurrently.
func (c *Console) leads() (leads, shared bool) {
	if c.o.Relay == nil {
		return false, false
	}
	st := c.o.Relay.Status()
	return st.Leader, st.Mode == outbox.ModePoll
}

// csrfHeader carries the token, which only a page of this origin can have read.
const csrfHeader = "X-Posthaste-Csrf"

// guarded refuses calls without the CSRF token. The listener checks the caller's rights.
func (c *Console) guarded(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !admin.Same(r.Header.Get(csrfHeader), c.csrf) {
			audit.Because(r, "no token of the page")
			admin.Problem(w, http.StatusForbidden,
				"this call needs the token of GET /console/api/session in "+csrfHeader+"; reload the page")
			return
		}
		if !c.actions.TryAcquire(1) {
			busy(w)
			return
		}
		defer c.actions.Release(1)
		defer c.entries.Forget()
		next(w, r)
	}
}

func busy(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	admin.Problem(w, http.StatusTooManyRequests, "the same action is already running; try again in a second")
}

func (c *Console) session(w http.ResponseWriter, _ *http.Request) {
	admin.Answer(w, http.StatusOK, map[string]any{
		"csrf": c.csrf, "kind": c.o.Kind, "relay": c.o.RelayName, "source": outbox.EntrySource(c.o.RelayName),
		"prefix": c.o.StreamPrefix, "holder": c.o.Holder, "version": c.o.Version,
	})
}

func (c *Console) setMode(w http.ResponseWriter, r *http.Request) {
	if err := admin.SetMode(w, r, c.o.Pool, c.o.RelayName); err != nil {
		c.fail(w, err)
	}
}

// fail answers after an error of Postgres or Redis. Its text has no secrets.
func (c *Console) fail(w http.ResponseWriter, err error) {
	c.log.Warn("console call", "err", err)
	admin.Problem(w, http.StatusServiceUnavailable, plain(err))
}

// plain describes an error in one line for an operator.
func plain(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer in time"
	}
	return ops.OneLine(err)
}
