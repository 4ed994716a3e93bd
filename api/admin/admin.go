// Package admin is the HTTP interface for operators: metrics, health, the relay's status and mode, parked events,
// profiles, and the console. It belongs on a listener of its own, on loopback unless the operator says otherwise.
package admin

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"posthaste/internal/ops"
	"posthaste/internal/shared"
	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sql"
)

// Options are what the admin interface shows and changes.
type Options struct {
	// Source is where GET /relay looks; its Pool serves the other calls, too. It should be no other work's: see Conns.
	// The caller closes it.
	ops.Source
	// Ready answers /readyz.
	Ready http.Handler
	// Token, if not empty, is required as bearer token by every call that changes something.
	Token string
	// Gatherer feeds /metrics.
	Gatherer prometheus.Gatherer
	// Console serves /console/; nil for none.
	Console http.Handler
	// Addr is the address as the operator wrote it, Bound what it became. On a loopback listener only requests for
	// loopback names and for Addr's host are answered; on another one, without a Token, pages under a name with a dot
	// that is not Addr's host change nothing. nil Bound: every request is answered.
	Addr  string
	Bound net.Addr
	// Logger may be nil.
	Logger *slog.Logger
}

// Conns is how many connections are in use at most by the reads, which ask once for all who read at the same time, and
// how many are left to what changes something.
const Conns = 2 + 2

type server struct {
	Options
	log *slog.Logger
	// status and dead are what reads answer with.
	status shared.Look[ops.Report]
	dead   shared.Look[[]ops.Dead]
}

// Handler returns the admin interface.
func Handler(o Options) http.Handler {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &server{Options: o, log: o.Logger.With("component", "admin")}
	s.status.Timeout, s.dead.Timeout = callTimeout, callTimeout
	s.status.Read = func(ctx context.Context) (ops.Report, error) {
		snap, err := s.Look(ctx)
		if err != nil {
			return ops.Report{}, err
		}
		return snap.Report(), nil
	}
	s.dead.Read = func(ctx context.Context) ([]ops.Dead, error) { return ops.ListDead(ctx, s.Pool) }
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", alive)
	mux.Handle("GET /readyz", o.Ready)
	mux.HandleFunc("GET /relay", ours(s.relay))
	mux.HandleFunc("PUT /relay/mode", s.guarded(s.setMode))
	mux.HandleFunc("GET /relay/dead", ours(s.listDead))
	mux.HandleFunc("POST /relay/dead/{id}/retry", s.guarded(s.retryDead))
	mux.HandleFunc("DELETE /relay/dead/{id}", s.guarded(s.dropDead))
	mux.HandleFunc("GET /debug/pprof/", ours(pprof.Index))
	mux.HandleFunc("GET /debug/pprof/cmdline", ours(pprof.Cmdline))
	mux.HandleFunc("GET /debug/pprof/profile", ours(pprof.Profile))
	mux.HandleFunc("GET /debug/pprof/symbol", ours(pprof.Symbol))
	mux.HandleFunc("GET /debug/pprof/trace", ours(pprof.Trace))
	if s.Console != nil {
		mux.Handle("/console/", s.Console)
		mux.Handle("GET /{$}", http.RedirectHandler("/console/", http.StatusSeeOther))
	}
	// A page of another origin, open in the operator's browser, must not be able to switch modes.
	return s.knownHost(http.NewCrossOriginProtection().Handler(mux))
}

// sameOrigin asks of a read what browsers are asked of what changes something.
var sameOrigin = http.NewCrossOriginProtection()

// ours refuses to be read by pages of other origins. They could not see the answer, but have it made again and again.
// (Health and metrics cost little, and are for everybody; the console sees to itself.)
func ours(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		as := &http.Request{Method: http.MethodPost, URL: r.URL, Host: r.Host, Header: r.Header}
		if sameOrigin.Check(as) != nil {
			problem(w, http.StatusForbidden, "this is not for pages of other origins")
			return
		}
		next(w, r)
	}
}

// knownHost refuses requests that were not meant for this process: a page elsewhere whose name was made to resolve to
// its address counts as the same origin in a browser. On a loopback listener that page could read everything;
// elsewhere, where a process does not know all its names, it must at least not change anything, as long as no token is
// asked for. (curl sends no Origin.)
func (s *server) knownHost(next http.Handler) http.Handler {
	bound, ok := s.Bound.(*net.TCPAddr)
	if !ok {
		return next
	}
	asked, _, _ := net.SplitHostPort(s.Addr)
	local := bound.IP.IsLoopback()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := hostOf(r.Host)
		addr, err := netip.ParseAddr(host)
		known := err == nil && addr.IsLoopback() || host == "localhost" || strings.HasSuffix(host, ".localhost") ||
			host != "" && strings.EqualFold(host, asked)
		switch {
		case known:
		case local:
			problem(w, http.StatusMisdirectedRequest,
				"this listener answers for this machine only; use 127.0.0.1 or localhost, or name the host in "+
					"--admin-addr")
			return
		// An address cannot be made to resolve to another, and a name without a dot is nobody else's.
		case r.Header.Get("Origin") != "" && !safe(r.Method) && s.Token == "" && err != nil &&
			strings.Contains(host, "."):
			problem(w, http.StatusMisdirectedRequest,
				"without an admin token nothing is changed under this name; set POSTHASTE_ADMIN_TOKEN, use an "+
					"address, or name the host in --admin-addr")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// safe reports whether requests of a method change nothing.
func safe(method string) bool {
	return method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions
}

// hostOf is the name or address in a Host header.
func hostOf(header string) string {
	if h, _, err := net.SplitHostPort(header); err == nil {
		header = h
	}
	return strings.ToLower(strings.Trim(header, "[]"))
}

// Metrics returns what a process without anything to administer shows: metrics, that it runs, and whether it does its
// work: stalled says why not, "" if it does.
func Metrics(g prometheus.Gatherer, stalled func() string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := stalled(); why != "" {
			write(w, http.StatusServiceUnavailable, map[string][]string{"reasons": {"stalled: " + why}})
			return
		}
		write(w, http.StatusOK, struct{}{})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", alive)
	return mux
}

func alive(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }

// RelayReady answers /readyz for a relay: 503 with the reasons, or 200 with the role or what is degraded.
func RelayReady(r *relay.Relay) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		ready := ops.ReadyOf(r.Health())
		status := http.StatusOK
		if !ready.Ready {
			status = http.StatusServiceUnavailable
		}
		write(w, status, ready)
	})
}

// callTimeout bounds what one request asks of Postgres.
const callTimeout = 5 * time.Second

func (s *server) relay(w http.ResponseWriter, r *http.Request) {
	report, err := s.status.Get(r.Context())
	if err != nil {
		s.fail(w, err)
		return
	}
	write(w, http.StatusOK, report)
}

// readMode reads the mode that is asked for; on failure it has answered.
func readMode(w http.ResponseWriter, r *http.Request) (outbox.Mode, bool) {
	var body struct {
		Mode string `json:"mode"`
	}
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096))
	d.DisallowUnknownFields()
	if err := d.Decode(&body); err != nil {
		problem(w, http.StatusBadRequest, `the body must be {"mode":"auto"|"cdc"|"poll"}`)
		return "", false
	}
	mode, err := outbox.ParseMode(body.Mode)
	if err != nil {
		problem(w, http.StatusUnprocessableEntity, err.Error())
		return "", false
	}
	return mode, true
}

func (s *server) setMode(w http.ResponseWriter, r *http.Request) {
	mode, ok := readMode(w, r)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	if err := ops.SetMode(ctx, s.Pool, s.RelayName, mode); err != nil {
		s.fail(w, err)
		return
	}
	s.changed()
	s.log.Info("mode set", "desired", mode)
	write(w, http.StatusOK, map[string]outbox.Mode{"desired": mode})
}

func (s *server) listDead(w http.ResponseWriter, r *http.Request) {
	dead, err := s.dead.Get(r.Context())
	if err != nil {
		s.fail(w, err)
		return
	}
	write(w, http.StatusOK, map[string][]ops.Dead{"dead": dead})
}

func (s *server) retryDead(w http.ResponseWriter, r *http.Request) {
	s.onDead(w, r, "retried", func(ctx context.Context, id uuid.UUID) error { return sql.RetryDead(ctx, s.Pool, id) })
}

func (s *server) dropDead(w http.ResponseWriter, r *http.Request) {
	s.onDead(w, r, "dropped", func(ctx context.Context, id uuid.UUID) error { return sql.DropDead(ctx, s.Pool, id) })
}

// deadID accepts the 36-character form only; uuid.Parse knows others.
func deadID(s string) (uuid.UUID, error) {
	if len(s) != 36 {
		return uuid.Nil, errors.New("not 36 characters")
	}
	return uuid.Parse(s)
}

func (s *server) onDead(w http.ResponseWriter, r *http.Request, done string,
	act func(ctx context.Context, id uuid.UUID) error,
) {
	id, err := deadID(r.PathValue("id"))
	if err != nil {
		problem(w, http.StatusBadRequest, "the id must be a UUID")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	err = act(ctx, id)
	s.changed()
	switch {
	case errors.Is(err, sql.ErrNotParked):
		problem(w, http.StatusNotFound, sql.ErrNotParked.Error())
	case errors.Is(err, sql.ErrUnreadable):
		problem(w, http.StatusConflict, sql.ErrUnreadable.Error())
	case err != nil:
		s.fail(w, err)
	default:
		s.log.Info("parked event "+done, "event_id", id) //nolint:sloglint // two constants
		write(w, http.StatusAccepted, map[string]string{"id": id.String(), "result": done})
	}
}

// changed has the next reads look again.
func (s *server) changed() {
	s.status.Forget()
	s.dead.Forget()
}

// guarded asks for the token, if one is set.
func (s *server) guarded(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if s.Token != "" && (!ok || subtle.ConstantTimeCompare([]byte(given), []byte(s.Token)) != 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			problem(w, http.StatusUnauthorized, "this call needs the admin token")
			return
		}
		next(w, r)
	}
}

// fail answers for an error of Postgres; its text may be shown to an operator, it holds no secrets.
func (s *server) fail(w http.ResponseWriter, err error) {
	s.log.Warn("admin call", "err", err)
	problem(w, http.StatusServiceUnavailable, err.Error())
}

func problem(w http.ResponseWriter, status int, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	body(w, status, map[string]any{
		"type": "about:blank", "title": http.StatusText(status), "status": status,
		"detail": detail,
	})
}

func write(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	body(w, status, v)
}

func body(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	b, err := json.Marshal(v)
	if err != nil {
		b = fmt.Appendf(nil, `{"detail":%q}`, err.Error())
	}
	_, _ = w.Write(append(b, '\n'))
}
