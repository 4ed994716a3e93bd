package api

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/idem"
	"posthaste/internal/testenv"
)

// purse is an acceptance rule that a test can switch.
type purse struct{ empty atomic.Bool }

func (p *purse) accept(context.Context, Command) (*Refusal, error) {
	if p.empty.Load() {
		return &Refusal{Status: 402, Code: "insufficient_credits", Title: "Not enough credits", Detail: "balance 3"},
			nil
	}
	return nil, nil //nolint:nilnil // no refusal, no error: accepted
}

func TestARefusalIsStoredAndReplayed(t *testing.T) {
	t.Parallel()
	var p purse
	p.empty.Store(true)
	accepting := func(o *Options) { o.Accept = p.accept }
	w := newWorld(t, accepting)
	key := newKey()
	first := w.post(key, orderJSON(1))
	want(t, first, 402, "insufficient_credits")
	for _, part := range []string{`"retryable":false`, `"safe_new_key":true`, `"detail":"balance 3"`} {
		if !strings.Contains(first.body, part) {
			t.Errorf("%s is not in %s", part, first.body)
		}
	}
	p.empty.Store(false) // the key's answer does not change with the cause
	w.published()
	replays := []reply{w.post(key, orderJSON(1)), w.sibling(accepting).post(key, orderJSON(1))}
	w.redis.Client.FlushAll(t.Context())
	replays = append(replays, w.sibling(accepting).post(key, orderJSON(1)))
	for i, r := range replays {
		if r.status != 402 || r.body != first.body || r.header.Get("Idempotent-Replayed") != "true" ||
			r.header.Get("Location") != "" {
			t.Errorf("replay %d: %v %v", i, r, r.header)
		}
	}
	want(t, w.sibling(accepting).post(key, orderJSON(2)), 422, "idempotency_key_reused")
	want(t, w.post(newKey(), orderJSON(1)), 201, "")
	w.checkInvariants(1)
	if r := w.do("GET", "/orders?user_id="+testUser, ""); strings.Contains(r.body, "REJECTED") {
		t.Errorf("a refused order is listed: %v", r)
	}
	r := w.do("GET", "/orders/by-key?user_id="+testUser, "", idem.KeyHeader, key)
	if r.status != 200 || !strings.Contains(r.body, `"status":"REJECTED"`) ||
		!strings.Contains(r.body, `"problem":`+first.body) {
		t.Errorf("by key: %v", r)
	}
	id := testenv.Value[string](t, w.db, "SELECT id::text FROM orders WHERE status = 'REJECTED'")
	want(t, w.do("GET", "/orders/"+id, ""), 404, "not_found")
}

// A refused attempt and a successful one race for one key: there is one outcome. Without the unique index (the
// mutation) there are two.
func TestRefusalAndSuccessRaceForOneKey(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name            string
		zombie, mutated bool // zombie: the refused attempt resumes last
	}{{"refused first", false, false}, {"refused last", true, false}, {"without the index", true, true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var p purse
			p.empty.Store(c.zombie)
			slow := newWorld(t, func(o *Options) { o.Accept, o.Lease = p.accept, 200*time.Millisecond })
			var q purse
			q.empty.Store(!c.zombie)
			quick := slow.sibling(func(o *Options) { o.Accept = q.accept })
			if c.mutated {
				slow.db.Exec(t, "ALTER TABLE orders DROP CONSTRAINT orders_user_id_idem_key_key")
			}
			reached, goOn := make(chan struct{}), make(chan struct{})
			// Suspended between its decision and its insert, without heartbeats.
			slow.s.accept = func(ctx context.Context, cmd Command) (*Refusal, error) {
				r, err := p.accept(ctx, cmd)
				close(reached)
				<-goOn
				return r, err
			}
			slow.s.guard = idem.New(idem.Options{
				Redis: slow.s.redis, Lease: 200 * time.Millisecond,
				Routes: []string{routeOrders},
			})
			key := newKey()
			var wg sync.WaitGroup
			var zombie reply
			wg.Go(func() { zombie = slow.post(key, orderJSON(1)) })
			<-reached
			// Its lease ends after the last heartbeat; then the other takes over.
			winner := quick.post(key, orderJSON(1), "Prefer", "wait=10")
			if winner.status != 201 && winner.status != 402 {
				t.Fatalf("the second attempt got %v", winner)
			}
			close(goOn)
			wg.Wait()
			if n := slow.rows(); (n == 1) == c.mutated {
				t.Errorf("%d rows, mutated: %v", n, c.mutated)
			}
			if (zombie.body == winner.body) == c.mutated {
				t.Errorf("the zombie got %v, the winner %v", zombie, winner)
			}
		})
	}
}

func TestAnUndecidedAcceptanceStoresNothing(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	broken.Store(true)
	w := newWorld(t, func(o *Options) {
		o.Accept = func(context.Context, Command) (*Refusal, error) {
			if broken.Load() {
				return nil, errors.New("the ledger is away")
			}
			return nil, nil //nolint:nilnil // accepted
		}
	})
	key := newKey()
	want(t, w.post(key, orderJSON(1)), 503, "temporarily_unavailable")
	broken.Store(false)
	want(t, w.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
	w.checkInvariants(1)
}

func TestRunWatchesRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.redis.Client.ConfigSet(t.Context(), "maxmemory-policy", "allkeys-lru")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.s.Run(ctx) }()
	testenv.Eventually(t, 20*time.Second, func() error {
		policy := w.s.eviction.Load()
		return testenv.FailIf(policy == nil || *policy != "allkeys-lru", "not yet")
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// An order that is older than the guard's TTL is still replayed, and its answer does not suggest that the key has
// expired.
func TestAnOldOrderDoesNotExpire(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	w.post(key, orderJSON(1))
	w.published()
	w.redis.Client.FlushAll(t.Context())
	w.db.Exec(t, "UPDATE orders SET created_at = created_at - interval '400 days'")
	r := w.post(key, orderJSON(1))
	want(t, r, 201, "")
	expires, err := time.Parse(http.TimeFormat, r.header.Get("Idempotency-Expires"))
	if err != nil || time.Until(expires) < 23*time.Hour || r.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("expires %v, %v", expires, err)
	}
}
