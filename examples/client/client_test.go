package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/api"
	"posthaste/idem"
	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

const user = "5b3c1f9e-8a57-4d0e-9d55-2f4a6b1c7e11"

// newAPI starts the API behind a handler that may lose a request or its answer.
func newAPI(t *testing.T, spoil func(n int64, w http.ResponseWriter, r *http.Request,
	next http.Handler),
) (*testenv.Database, string) {
	t.Helper()
	db, rds := testenv.Postgres(t), testenv.Redis(t)
	cfg, err := sql.OrderPoolConfig(db.URL, "public")
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	rdb, err := idem.NewClient(rds.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rdb.Close() })
	s, err := api.New(api.Options{Pool: pool, Redis: rdb})
	if err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
		r *http.Request,
	) {
		spoil(n.Add(1), w, r, s.Public())
	}))
	t.Cleanup(h.Close)
	return db, h.URL
}

func place(ctx context.Context, url, journal string) error {
	return run(ctx, []string{"-url", url, "-journal", journal, "-user", user, "-amount", "1250", "-patience", "1m"})
}

// Requests are lost, answers are lost, and a proxy answers in between: there is one order.
func TestWhateverHappensOnTheWay(t *testing.T) {
	t.Parallel()
	db, url := newAPI(t, func(n int64, w http.ResponseWriter, r *http.Request, next http.Handler) {
		switch n {
		case 1: // the request is lost
			panic(http.ErrAbortHandler)
		case 2, 3: // the answer is lost
			next.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		case 4:
			http.Error(w, "bad gateway", http.StatusBadGateway)
		default:
			next.ServeHTTP(w, r)
		}
	})
	journal := filepath.Join(t.TempDir(), "order.json")
	if err := place(t.Context(), url, journal); err != nil {
		t.Fatal(err)
	}
	if n := testenv.Value[int](t, db, "SELECT count(*) FROM orders"); n != 1 {
		t.Errorf("%d orders", n)
	}
	if _, err := os.Stat(journal); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the journal is still there: %v", err)
	}
}

// The client gives up, or dies, after its order was placed and before it got the answer. The next run finishes the same
// operation; the run after that is a new one.
func TestARunAfterACrashFinishesTheSameOrder(t *testing.T) {
	t.Parallel()
	var deaf atomic.Bool
	deaf.Store(true)
	ctx, giveUp := context.WithCancel(t.Context())
	db, url := newAPI(t, func(_ int64, w http.ResponseWriter, r *http.Request, next http.Handler) {
		if deaf.Load() {
			answer := httptest.NewRecorder()
			next.ServeHTTP(answer, r)
			if answer.Code == http.StatusCreated {
				giveUp()
			}
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
	journal := filepath.Join(t.TempDir(), "order.json")
	err := place(ctx, url, journal)
	if err == nil || !strings.Contains(err.Error(), "not known") {
		t.Fatalf("got %v", err)
	}
	if n := testenv.Value[int](t, db, "SELECT count(*) FROM orders"); n != 1 {
		t.Fatalf("%d orders before the second run", n)
	}
	deaf.Store(false)
	for want := 1; want <= 2; want++ {
		if err := place(t.Context(), url, journal); err != nil {
			t.Fatal(err)
		}
		if n := testenv.Value[int](t, db, "SELECT count(*) FROM orders"); n != want {
			t.Errorf("%d orders, want %d", n, want)
		}
	}
}

func TestARefusalIsFinal(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	_, url := newAPI(t, func(n int64, w http.ResponseWriter, r *http.Request, next http.Handler) {
		requests.Store(n)
		next.ServeHTTP(w, r)
	})
	journal := filepath.Join(t.TempDir(), "order.json")
	err := run(t.Context(), []string{"-url", url, "-journal", journal, "-user", user, "-amount", "0"})
	var r *Refused
	if !errors.As(err, &r) || r.Code != "validation_failed" || r.Retryable || !r.SafeNewKey {
		t.Errorf("got %v", err)
	}
	if n := requests.Load(); n != 1 {
		t.Errorf("%d requests", n)
	}
	if err := place(t.Context(), url, journal); err != nil {
		t.Errorf("the next order: %v", err)
	}
	if got := fmt.Sprint(r); !strings.Contains(got, "validation_failed") {
		t.Error(got)
	}
}
