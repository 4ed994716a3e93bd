package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

// Readiness checks take no connection from orders, and concurrent ones share an answer.
func TestAskingForReadinessLeavesTheOrdersTheirConnections(t *testing.T) {
	t.Parallel()
	var probe *sql.Pool
	w := newWorld(t, func(o *Options) {
		cfg := o.Pool.Config()
		cfg.MaxConns = 1
		var err error
		if probe, err = pgxpool.NewWithConfig(context.Background(), cfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(probe.Close)
		o.Probe = probe
	})
	before := w.s.o.Pool.Stat().AcquireCount()
	h := w.s.Readyz()
	var all sync.WaitGroup
	for range 40 {
		all.Go(func() {
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", nil))
			testenv.Equal(t, "status", rec.Code, http.StatusOK)
		})
	}
	all.Wait()
	testenv.Equal(t, "connections of the orders' that were taken", w.s.o.Pool.Stat().AcquireCount()-before, 0)
	if n := probe.Stat().AcquireCount(); n == 0 || n > 20 {
		t.Errorf("%d connections were taken", n)
	}
}
