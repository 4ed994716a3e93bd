package app

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Admin addresses of the processes where the settings name none.
const (
	DefaultServeAdmin = "127.0.0.1:9090"
	defaultRelayAdmin = "127.0.0.1:9091"
)

// Publication is the name of the publication that the slot reads.
const Publication = "posthaste"

// Listen binds an address. It is the one step of a start that cannot succeed by waiting.
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// newRegistry returns a registry with what every process exports.
func newRegistry(version string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthaste_build_info",
		Help: "Always 1; the version is the label.",
	}, []string{"version"})
	info.WithLabelValues(version).Set(1)
	reg.MustRegister(info)
	return reg
}

// ServeHTTP runs h on l until ctx ends, then lets what is in flight finish.
func ServeHTTP(ctx context.Context, srv *http.Server, l net.Listener, drain time.Duration) error {
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
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

// adminServer returns a server for the admin listener.
func adminServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 15 * time.Second,
		IdleTimeout: time.Minute,
	}
}

// holder names this process for people.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// inTime runs work until ctx ends, and then no longer than the drain timeout: a server that does not answer would hold
// up the end by one timeout after the other. What is left to the end of the process is what a crash would leave.
func (c Config) inTime(ctx context.Context, log *slog.Logger, work func(ctx context.Context) error) error {
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
	case <-time.After(max(c.DrainTimeout, time.Second)):
		log.Warn("not everything stopped within the drain timeout; exiting anyway")
		return nil
	}
}
