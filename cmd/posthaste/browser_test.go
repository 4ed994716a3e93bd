//go:build browser

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// The browser tests are in api/admin/console/browser/console.test.mjs. This test starts real processes for them, and a
// control server that breaks and repairs the pipeline, and runs them. Start it with `make test-browser`.
func TestConsoleInABrowser(t *testing.T) {
	w := newWorld(t)
	b := &browserWorld{w: w, user: uuid.NewString()}
	w.spreads(2)
	b.relay = w.spawn("relay")
	w.waitMode("cdc")
	b.guarded = w.spawn("relay", "--admin-token=open-sesame", "--admin-read-token=look")
	b.serve = w.spawn("serve")
	w.spawn("consume", "--group=mailer", "--claim-idle=1s")
	control := httptest.NewServer(b.routes())
	defer control.Close()

	folder := filepath.Join(testenv.Root(t), "api", "admin", "console", "browser")
	cmd := exec.CommandContext(t.Context(), "node", "console.test.mjs")
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), "RELAY="+b.relay.admin, "GUARDED="+b.guarded.admin, "SERVE="+b.serve.admin,
		"CONTROL="+control.URL, "TOKEN=open-sesame", "READ_TOKEN=look")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	p := testenv.Start(t, cmd)
	<-p.Done()
	if p.ExitCode() != 0 {
		t.Fatalf("the browser tests failed: %v", cmd.ProcessState)
	}
}

// browserWorld has the changes that the browser tests can make to the pipeline by a POST to a path of the control
// server.
type browserWorld struct {
	w                     *world
	relay, guarded, serve *child
	user                  string
	load                  *testenv.Load
}

func (b *browserWorld) routes() http.Handler {
	mux := http.NewServeMux()
	does := func(path string, do func(r *http.Request) (any, error)) {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			v, err := do(r)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			_ = json.NewEncoder(w).Encode(v)
		})
	}
	redis := b.w.redis
	// The stream of one aggregate of the type that a request names.
	stream := func(r *http.Request) string {
		return outbox.Layout{Prefix: "outbox.", Shards: 2}.Stream(r.URL.Query().Get("type"), "no-7")
	}
	does("/redis/kill", func(*http.Request) (any, error) { return nil, redis.Kill() })
	does("/redis/start", func(*http.Request) (any, error) { return nil, redis.Start(context.Background()) })
	does("/redis/freeze", func(*http.Request) (any, error) { return nil, redis.Signal(syscall.SIGSTOP) })
	does("/redis/thaw", func(*http.Request) (any, error) { return nil, redis.Signal(syscall.SIGCONT) })
	does("/orders", func(r *http.Request) (any, error) { return b.orders(r.Context()) })
	does("/poison", func(r *http.Request) (any, error) {
		id := uuid.NewString()
		n, _ := strconv.Atoi(r.URL.Query().Get("n"))
		if err := redis.Client.Set(r.Context(), stream(r), "not a stream", 0).Err(); err != nil {
			return nil, err
		}
		_, err := b.w.db.Pool.Exec(r.Context(),
			`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			SELECT CASE i WHEN 1 THEN $1 ELSE gen_random_uuid() END, $3::text, 'no-7', $3 || '.sent', '{"total": 1}'
			FROM generate_series(1, $2::integer) AS i`, id, max(n, 1), r.URL.Query().Get("type"))
		return id, err
	})
	does("/fix", func(r *http.Request) (any, error) {
		return nil, redis.Client.Del(r.Context(), stream(r)).Err()
	})
	does("/published", func(r *http.Request) (any, error) {
		list, err := redis.Client.XRange(r.Context(), stream(r), "-", "+").Result()
		ids := []any{}
		for _, m := range list {
			ids = append(ids, m.Values["id"])
		}
		return ids, err
	})
	does("/load", func(r *http.Request) (any, error) {
		if b.load != nil {
			b.load.Stop()
			b.load = nil
		}
		if rate, _ := strconv.Atoi(r.URL.Query().Get("rate")); rate > 0 {
			b.load = testenv.StartLoad(b.w.t, b.w.db, testenv.LoadOptions{Rate: rate, Tolerant: true})
		}
		return nil, nil
	})
	does("/guarded/kill", func(*http.Request) (any, error) { b.guarded.kill(); return nil, nil })
	return mux
}

// orders places three orders and returns their ids.
func (b *browserWorld) orders(ctx context.Context) ([]string, error) {
	var ids []string
	for range 3 {
		// The page must not show the amount. It is a number that no id, address or time on the page contains by chance.
		body := fmt.Sprintf(`{"user_id":%q,"amount":314159265,"currency":"USD"}`, b.user)
		a, err := testenv.Request(ctx, http.MethodPost, b.serve.http+"/orders", body, "Idempotency-Key",
			uuid.NewString())
		var order struct{ ID string }
		if err != nil || json.Unmarshal(a.Body, &order) != nil || order.ID == "" {
			return nil, fmt.Errorf("POST /orders: status %d, %w: %s", a.Status, err, a.Body)
		}
		ids = append(ids, order.ID)
	}
	return ids, nil
}
