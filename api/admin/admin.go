// Package admin is the HTTP interface for operators: metrics, health, the relay's status and mode, dead events,
// profiles, and the console. It needs a listener of its own, by default on loopback.
package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"posthaste/internal/audit"
	"posthaste/internal/ops"
	"posthaste/internal/shared"
	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sql"
)

// Options are the data and actions that the admin interface serves.
type Options struct {
	// Source serves the reads. Its Pool should be used for nothing else; see Conns for its size. The caller closes it.
	ops.Source
	Ready    http.Handler
	Gatherer prometheus.Gatherer
	// Console serves /console/. If nil, there is no console.
	Console http.Handler
	Access
	// Profiles enables /debug/pprof/.
	Profiles bool
	// Logger may be nil.
	Logger *slog.Logger
}

// Conns is the maximum number of connections in use: two by the reads, which concurrent callers share, and two by
// writes.
const Conns = 2 + 2

type server struct {
	Options
	log   *slog.Logger
	trail *audit.Trail
	// status and dead are the shared results of reads.
	status shared.Look[ops.Report]
	dead   shared.Look[map[string][]ops.Dead]
}

func Handler(o Options) http.Handler {
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	s := &server{Options: o, log: o.Logger.With("component", "admin"), trail: audit.New(o.Pool, o.Logger)}
	s.status.Timeout, s.dead.Timeout = CallTimeout, CallTimeout
	s.status.Read = func(ctx context.Context) (ops.Report, error) {
		snap, err := s.Look(ctx)
		if err != nil {
			return ops.Report{}, err
		}
		return snap.Report(), nil
	}
	s.dead.Read = func(ctx context.Context) (map[string][]ops.Dead, error) {
		list, err := ops.ListDead(ctx, s.Pool)
		return map[string][]ops.Dead{"dead": list}, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", alive)
	mux.Handle("GET /readyz", o.Ready)
	mux.HandleFunc("GET /relay", s.reads(shows(s, &s.status)))
	mux.HandleFunc("PUT /relay/mode", s.writes(s.setMode))
	mux.HandleFunc("GET /relay/dead", s.reads(shows(s, &s.dead)))
	mux.HandleFunc("POST /relay/dead/{id}/retry", s.writes(s.onDead("retried", sql.RetryDead)))
	mux.HandleFunc("DELETE /relay/dead/{id}", s.writes(s.onDead("dropped",
		func(ctx context.Context, pool *sql.Pool, id uuid.UUID) error { return sql.DropDead(ctx, pool, id) })))
	addProfiles(mux, &s.Access, s.Profiles)
	if s.Console != nil {
		mux.Handle("/console/", s.console(s.Console))
		mux.Handle("GET /{$}", http.RedirectHandler("/console/", http.StatusSeeOther))
	}
	// A page of another origin, open in the operator's browser, must not be able to switch modes.
	pages := http.NewCrossOriginProtection()
	pages.SetDenyHandler(http.HandlerFunc(foreign))
	return s.audited(s.knownHost(pages.Handler(mux)))
}

// Metrics serves /metrics, /healthz and /readyz of a process without an admin interface. stalled returns why the
// process makes no progress, or "".
func Metrics(g prometheus.Gatherer, stalled func() string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := stalled(); why != "" {
			Answer(w, http.StatusServiceUnavailable, map[string][]string{"reasons": {"stalled: " + why}})
			return
		}
		Answer(w, http.StatusOK, struct{}{})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.HandleFunc("GET /healthz", alive)
	return mux
}

func alive(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok\n") }

func RelayReady(r *relay.Relay) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		ready := r.Health()
		status := http.StatusOK
		if !ready.Ready {
			status = http.StatusServiceUnavailable
		}
		Answer(w, status, ready)
	})
}

// CallTimeout bounds the calls of Postgres and Redis of one request.
const CallTimeout = 5 * time.Second

// shows returns the handler of a shared result.
func shows[T any](s *server, shared *shared.Look[T]) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		result, err := shared.Get(r.Context())
		if err != nil {
			s.fail(w, err)
			return
		}
		Answer(w, http.StatusOK, result)
	}
}

// Read decodes a small body. On failure it answers with detail and returns false.
func Read(w http.ResponseWriter, r *http.Request, into any, detail string) bool {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, MaxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		Problem(w, http.StatusBadRequest, detail)
		return false
	}
	return true
}

// MaxBody is the longest body in bytes.
const MaxBody = 64 << 10

func (s *server) setMode(w http.ResponseWriter, r *http.Request) {
	if err := SetMode(w, r, s.Pool, s.RelayName); err != nil {
		s.fail(w, err)
		return
	}
	s.changed()
}

// SetMode sets a relay's desired mode to that of the body, and answers. If it returns an error, it has not answered.
func SetMode(w http.ResponseWriter, r *http.Request, pool *pgxpool.Pool, relay string) error {
	var body struct {
		Mode string `json:"mode"`
	}
	if !Read(w, r, &body, `the body must be {"mode":"auto"|"cdc"|"poll"}`) {
		return nil
	}
	mode, err := outbox.ParseMode(body.Mode)
	if err != nil {
		Problem(w, http.StatusUnprocessableEntity, err.Error())
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), CallTimeout)
	defer cancel()
	args := audit.Detail{"mode": string(mode), "relay": relay}
	err = audit.Do(ctx, args, func(ctx context.Context) (audit.Detail, error) {
		return nil, ops.SetMode(ctx, pool, relay, mode)
	})
	if err == nil {
		Answer(w, http.StatusOK, map[string]outbox.Mode{"desired": mode})
	}
	return err
}

// deadID accepts only the 36-character form; uuid.Parse accepts others too.
func deadID(s string) (uuid.UUID, error) {
	if len(s) != 36 {
		return uuid.Nil, errors.New("not 36 characters")
	}
	return uuid.Parse(s)
}

// onDead returns the handler of an action on a dead event.
func (s *server) onDead(done string, act func(ctx context.Context, pool *sql.Pool, id uuid.UUID) error,
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id, err := deadID(r.PathValue("id"))
		if err != nil {
			Problem(w, http.StatusBadRequest, "the id must be a UUID")
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), CallTimeout)
		defer cancel()
		args := audit.Detail{"ids": []string{id.String()}}
		err = audit.Do(ctx, args, func(ctx context.Context) (audit.Detail, error) { return nil, act(ctx, s.Pool, id) })
		s.changed()
		switch {
		case errors.Is(err, sql.ErrNotParked):
			Problem(w, http.StatusNotFound, sql.ErrNotParked.Error())
		case errors.Is(err, sql.ErrUnreadable):
			Problem(w, http.StatusConflict, sql.ErrUnreadable.Error())
		case err != nil:
			s.fail(w, err)
		default:
			Answer(w, http.StatusAccepted, map[string]string{"id": id.String(), "result": done})
		}
	}
}

// changed invalidates the shared results of reads.
func (s *server) changed() {
	s.status.Forget()
	s.dead.Forget()
}

// fail answers after an error of Postgres. The text has no secrets, so operators may read it.
func (s *server) fail(w http.ResponseWriter, err error) {
	s.log.Warn("admin call", "err", err)
	Problem(w, http.StatusServiceUnavailable, err.Error())
}

// Problem answers with a problem in the form of RFC 9457.
func Problem(w http.ResponseWriter, status int, detail string) {
	w.Header().Set("Content-Type", "application/problem+json")
	Answer(w, status, map[string]any{
		"type": "about:blank", "title": http.StatusText(status), "status": status, "detail": detail,
	})
}

// Answer answers with v as JSON, or with status 500 if v cannot be encoded.
func Answer(w http.ResponseWriter, status int, v any) {
	h := w.Header()
	if h.Get("Content-Type") == "" {
		h.Set("Content-Type", "application/json")
	}
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, fmt.Appendf(nil, `{"detail":%q}`, err.Error())
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
