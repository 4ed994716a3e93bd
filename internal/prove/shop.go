package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/oracle"
	"posthaste/internal/pause"
)

const (
	// shoppers is the number of clients; shopEvery is the interval between the requests of one client.
	shoppers  = 6
	shopEvery = 250 * time.Millisecond
	// patience is how long a client repeats a request before it gives up. The outcome of that request is then unknown.
	patience = 20 * time.Second
	// accountCount is the number of accounts that the clients share.
	accountCount = 5
)

// shop runs clients of the API: they place orders, repeat keys, and spend credits.
type shop struct {
	orders *orders
	serves []*process
	user   uuid.UUID
	broken func(*oracle.Breach)

	mu       sync.Mutex
	accounts []*account
}

// account is what the clients know about an account of credits.
type account struct {
	user uuid.UUID
	// added and spent are the answered amounts, maybeAdded and maybeSpent those without an answer.
	added, spent, maybeAdded, maybeSpent int64
}

func newShop(o *orders, serves []*process, broken func(*oracle.Breach)) *shop {
	s := &shop{orders: o, serves: serves, user: uuid.New(), broken: broken}
	for range accountCount {
		s.accounts = append(s.accounts, &account{user: uuid.New()})
	}
	return s
}

// run runs the clients until ctx ends.
func (s *shop) run(ctx context.Context, seed uint64) {
	var all sync.WaitGroup
	for i := range shoppers {
		r := oracle.Random(seed, 1000+uint64(i))
		all.Go(func() {
			for pause.About(ctx, shopEvery) == nil {
				if r.IntN(3) == 0 {
					s.spend(ctx, r)
				} else {
					s.order(ctx, r)
				}
			}
		})
	}
	all.Wait()
}

// order places an order. It repeats one key in five, and expects the same answer.
func (s *shop) order(ctx context.Context, r *rand.Rand) {
	key := newKey()
	s.orders.use(key)
	body := fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"USD"}`, s.user, 1+r.IntN(100_000))
	times := 1
	if r.IntN(5) == 0 {
		times = 2
	}
	for range times {
		status, answer := s.insist(ctx, r, "/orders", key, body, http.StatusCreated)
		if status != http.StatusCreated {
			return // the outcome is unknown
		}
		var order struct{ ID uuid.UUID }
		if err := json.Unmarshal(answer, &order); err != nil || order.ID == uuid.Nil {
			s.broken(&oracle.Breach{Promise: "orders", What: "201 for an order, without its id"})
			return
		}
		if b := s.orders.answer(key, order.ID); b != nil {
			s.broken(b)
		}
	}
}

func (s *shop) spend(ctx context.Context, r *rand.Rand) {
	a := s.accounts[r.IntN(len(s.accounts))]
	path, amount, final := "/deduct/", int64(1+r.IntN(20)), http.StatusPaymentRequired
	if r.IntN(4) == 0 {
		path, amount, final = "/add/", int64(20+r.IntN(40)), http.StatusOK
	}
	s.mu.Lock()
	known := a.added > 0
	s.mu.Unlock()
	if !known && path == "/deduct/" {
		path = "/add/" // the first add creates the account
	}
	body := fmt.Sprintf(`{"amount":%d}`, amount)
	status, _ := s.insist(ctx, r, path+a.user.String(), newKey(), body, http.StatusOK, final)
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := map[string][2]*int64{"/add/": {&a.added, &a.maybeAdded}, "/deduct/": {&a.spent, &a.maybeSpent}}[path]
	switch status {
	case http.StatusOK:
		*sum[0] += amount
	case http.StatusPaymentRequired:
	default:
		*sum[1] += amount
	}
}

// insist repeats a request to any of the APIs until the answer has a wanted status. If patience runs out, it returns
// status 0.
func (s *shop) insist(
	ctx context.Context, r *rand.Rand, path string, key uuid.UUID, body string, wanted ...int,
) (int, []byte) {
	// The end of the campaign does not cancel a request: its outcome would be unknown.
	work, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	for {
		one, stop := context.WithTimeout(work, 8*time.Second)
		a, err := local.Request(one, http.MethodPost, "http://"+s.serves[r.IntN(len(s.serves))].http+path, body,
			"Idempotency-Key", key.String())
		stop()
		if err == nil && slices.Contains(wanted, a.Status) {
			return a.Status, a.Body
		}
		if pause.For(work, 100*time.Millisecond) != nil || ctx.Err() != nil && err != nil {
			return 0, nil
		}
	}
}

// newKey returns a new idempotency key.
func newKey() uuid.UUID {
	key, err := uuid.NewV7()
	if err != nil {
		return uuid.New() // without a random source, New panics
	}
	return key
}
