// Package admin is the HTTP interface for operators: metrics, health, the relay's status and mode, dead events,
// profiles, and the console. It needs a listener of its own, by default on loopback.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"
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
	dead   shared.Look[[]ops.Dead]
}

func Handler(o Options) http.Handler {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &server{Options: o, log: o.Logger.With("component", "admin"), trail: audit.New(o.Pool, o.Logger)}
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
	mux.HandleFunc("GET /relay", s.reads(s.relay))
	mux.HandleFunc("PUT /relay/mode", s.writes(s.setMode))
	mux.HandleFunc("GET /relay/dead", s.reads(s.listDead))
	mux.HandleFunc("POST /relay/dead/{id}/retry", s.writes(s.retryDead))
	mux.HandleFunc("DELETE /relay/dead/{id}", s.writes(s.dropDead))
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

// callTimeout bounds the Postgres calls of one request.
const callTimeout = 5 * time.Second

func (s *server) relay(w http.ResponseWriter, r *http.Request) {
	report, err := s.status.Get(r.Context())
	if err != nil {
		s.fail(w, err)
		return
	}
	write(w, http.StatusOK, report)
}

// readMode reads the requested mode. On failure it writes the response and returns false.
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
	args := audit.Detail{"mode": string(mode), "relay": s.RelayName}
	err := audit.Do(ctx, args, func(ctx context.Context) (audit.Detail, error) {
		return nil, ops.SetMode(ctx, s.Pool, s.RelayName, mode)
	})
	if err != nil {
		s.fail(w, err)
		return
	}
	s.changed()
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

// deadID accepts only the 36-character form; uuid.Parse accepts others too.
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
	args := audit.Detail{"ids": []string{id.String()}}
	err = audit.Do(ctx, args, func(ctx context.Context) (audit.Detail, error) { return nil, act(ctx, id) })
	s.changed()
	switch {
	case errors.Is(err, sql.ErrNotParked):
		problem(w, http.StatusNotFound, sql.ErrNotParked.Error())
	case errors.Is(err, sql.ErrUnreadable):
		problem(w, http.StatusConflict, sql.ErrUnreadable.Error())
	case err != nil:
		s.fail(w, err)
	default:
		write(w, http.StatusAccepted, map[string]string{"id": id.String(), "result": done})
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
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, fmt.Appendf(nil, `{"detail":%q}`, err.Error())
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
