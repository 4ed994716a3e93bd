package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"posthaste/api"
	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/internal/pause"
	"posthaste/relay"
	"posthaste/sink"
	"posthaste/sql"
)

// Admin addresses that the processes use by default.
const (
	defaultServeAdmin = "127.0.0.1:9090"
	defaultRelayAdmin = "127.0.0.1:9091"
)

// process has the parts that serve and relay share: connections, the console, and the admin listener.
type process struct {
	config   Config
	log      *slog.Logger
	registry *prometheus.Registry
	traces   *tracing
	pool     *pgxpool.Pool
	// adminPool serves operators and probes, so that their queries and the work do not delay each other.
	adminPool *pgxpool.Pool
	// console is nil if events are published to NATS.
	console *console.Console
	admin   net.Listener
	server  *http.Server
	refused *prometheus.CounterVec
	// closers free the resources of the process.
	closers []func()
}

// pooled returns a pool that Close closes. It connects at its first use.
func (p *process) pooled(ctx context.Context, config *pgxpool.Config) (*pgxpool.Pool, error) {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err == nil {
		p.closers = append(p.closers, pool.Close)
	}
	return pool, err
}

// closes makes Close close c.
func (p *process) closes(c io.Closer) { p.closers = append(p.closers, func() { _ = c.Close() }) }

func newProcess(c Config, log *slog.Logger) process {
	pause.Spread()
	reg := newRegistry(c.Version)
	return process{config: c, log: log, registry: reg, refused: newRefusals(reg)}
}

func (p *process) connect(ctx context.Context, config *pgxpool.Config) (err error) {
	if p.pool, err = p.pooled(ctx, config); err != nil {
		return err
	}
	p.registry.MustRegister(newPoolMetrics(p.pool))
	cfg, err := sql.PoolConfig(p.config.PostgresURL, p.config.Schema, "admin")
	if err != nil {
		return cli.Usage(err.Error())
	}
	cfg.MaxConns, cfg.MinConns = admin.Conns+probes, 0
	// This also ends the queries of clients that have disconnected.
	cfg.ConnConfig.RuntimeParams["statement_timeout"] = strconv.FormatInt(adminTimeout.Milliseconds(), 10)
	p.adminPool, err = p.pooled(ctx, cfg)
	return err
}

// adminTimeout bounds a statement of the admin interface.
const adminTimeout = 5 * time.Second

// probes is how many connections the readiness of the API takes: concurrent probes share one check.
const probes = 1

// countAtMost is how many waiting events GET /relay counts.
const countAtMost = 100_000

// listen binds the admin listener, and makes the console of a process of a kind, and the server of both. ready
// answers /readyz; r is nil in a process without a relay.
func (p *process) listen(ctx context.Context, kind string, r *relay.Relay, ready http.Handler) (err error) {
	c := p.config
	slots, err := c.Slots(p.adminPool, p.log)
	if err != nil {
		return err
	}
	if p.admin, err = Listen(ctx, c.AdminAddr); err != nil {
		return err
	}
	p.closes(p.admin)
	p.admin = boundAdmin(p.admin, p.refused)
	if err := p.guarded(); err != nil {
		return err
	}
	var page http.Handler
	takes := c.natsReady
	if c.SinkURL == "" { // the console shows streams of Redis
		client, err := p.newConsole(ctx, console.Options{Kind: kind, Relay: r, Metrics: p.registry, Logger: p.log})
		if err != nil {
			return err
		}
		// The console's client, so that an operator's request takes no connection of the API.
		page, takes = p.console, sink.New(sink.Options{Client: client, Durability: c.RedisDurability}).Ready
	}
	p.server = c.adminServer(p.log, admin.Handler(admin.Options{
		Source: ops.Source{
			Pool: p.adminPool, RelayName: c.RelayName, Slots: slots, Relay: r, WALBudget: c.WALBudget,
			Most: countAtMost, NATS: c.SinkURL != "", Redis: takes,
		},
		Ready: ready, Gatherer: withRuntime(p.registry), Console: page, Profiles: c.AdminPprof.On(), Logger: p.log,
		Access: admin.Access{
			Token: c.AdminToken, ReadToken: c.AdminReadToken, Addr: c.AdminAddr, Bound: p.admin.Addr(),
			Hosts: c.AdminHosts,
		},
	}))
	return nil
}

// guarded refuses an admin listener beyond loopback without authentication of its clients. Its own certificate does
// not authenticate them; a CA of clients does.
func (p *process) guarded() error {
	c := p.config
	bound, ok := p.admin.Addr().(*net.TCPAddr)
	if !ok || bound.IP.IsLoopback() || c.AdminToken != "" || c.AdminClientCA != "" || c.AdminOpen.On() {
		return nil
	}
	return cli.Usage(fmt.Sprintf("--admin-addr=%s is beyond loopback: set --admin-token or --admin-client-ca, or "+
		"--admin-open=on to let any client read and change everything", c.AdminAddr))
}

// AdminAddr returns the address of the admin listener.
func (p *process) AdminAddr() net.Addr { return p.admin.Addr() }

// Close frees the resources of the process. It may be called again.
func (p *process) Close() {
	for _, free := range slices.Backward(p.closers) {
		free()
	}
	p.closers = nil
	p.traces.shutdown() // last, because it may wait for a collector
}

// runConsole runs the console, if there is one, until ctx ends.
func (p *process) runConsole(ctx context.Context) error {
	if p.console == nil {
		return nil
	}
	return p.console.Run(ctx)
}

// Listen binds an address. Its failure is the only one at a start that waiting cannot fix.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		if system, ok := errors.AsType[*os.SyscallError](err); ok {
			err = system.Err
		}
		return nil, fmt.Errorf("listen on %s: %w: set another --http-addr or --admin-addr, or stop what uses it",
			addr, err)
	}
	return l, nil
}

// newRegistry returns a registry with the metrics of every process, except those of withRuntime.
func newRegistry(version string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthaste_build_info",
		Help: "Always 1; the version is the label.",
	}, []string{"version"})
	info.WithLabelValues(version).Set(1)
	reg.MustRegister(info)
	return reg
}

// withRuntime adds the metrics of the Go runtime and of the process. They are separate because they are expensive to
// gather: the console, which reads the metrics every second, omits them.
func withRuntime(reg *prometheus.Registry) prometheus.Gatherer {
	system := prometheus.NewRegistry()
	system.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return prometheus.Gatherers{reg, system}
}

// ServeHTTP runs srv on l, with TLS if it has certificates, until ctx ends. Then it lets the requests in flight finish.
func ServeHTTP(ctx context.Context, srv *http.Server, l net.Listener, drain time.Duration) error {
	done := make(chan error, 1)
	go func() {
		if srv.TLSConfig != nil {
			done <- srv.ServeTLS(l, "", "")
		} else {
			done <- srv.Serve(l)
		}
	}()
	select {
	case err := <-done:
		return fmt.Errorf("serve on %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(drain, time.Second))
	defer cancel()
	if err := srv.Shutdown(sctx); err != nil {
		_ = srv.Close()
	}
	_ = <-done // http.ErrServerClosed
	return nil
}

func (c Config) adminServer(log *slog.Logger, h http.Handler) *http.Server {
	return withTLS(c.AdminTLS, log, &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		// A profile takes 30 seconds.
		WriteTimeout: 45 * time.Second, IdleTimeout: time.Minute, HTTP2: api.FrameLimits(),
	})
}

// holder names this process: host and pid.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// inTime runs work until ctx ends, and then for the drain timeout at most: with a server that does not answer, the
// timeouts of the single steps would add up. The process ends without the remaining work, as after a crash.
func (p *process) inTime(ctx context.Context, work func(ctx context.Context) error) error {
	done := make(chan error, 1)
	go func() { done <- work(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(max(p.config.DrainTimeout, time.Second)):
		p.log.Warn("not everything stopped within the drain timeout; exiting anyway")
		return nil
	}
}
