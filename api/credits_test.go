package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// newCreditWorld is an API with credits, and with the sync if sync is set.
func newCreditWorld(t *testing.T, sync bool, edit ...func(*Options)) *world {
	t.Helper()
	log := testenv.Logger(t)
	w := &world{tb: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}
	made, connections, err := credits.NewClient(w.redis.URL())
	must(t, err)
	c := patient(made) // a balance that takes over a second is another answer
	t.Cleanup(func() { _ = c.Close() })
	bank := credits.New(credits.Options{Redis: c, Connections: connections, Pool: w.db.Pool, Logger: log})
	w.start(w.db.URL, w.redis.URL(), append([]func(*Options){func(o *Options) { o.Credits = bank }}, edit...)...)
	if sync {
		testenv.Background(t, credits.NewSync(credits.SyncOptions{Redis: c, Pool: w.db.Pool, Logger: log}).Run)
	}
	return w
}

func (w *world) credit(path, key, body string) reply {
	w.tb.Helper()
	return w.do(http.MethodPost, path, body, idem.KeyHeader, key)
}

func TestCredits(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, true)
	d := loadDocument(t)
	user := uuid.NewString()
	want(t, w.do(http.MethodGet, "/balance/"+user, ""), 404, "unknown_user")
	want(t, w.credit("/deduct/"+user, newKey(), `{"amount":1}`), 404, "unknown_user")
	key := newKey()
	first := w.credit("/add/"+user, key, `{"amount":100,"reference":"gift"}`)
	want(t, first, 200, "")
	var op struct {
		OpID       uuid.UUID `json:"op_id"`
		UserID     string    `json:"user_id"`
		Kind       string
		Amount     int
		Balance    int
		Seq        int
		Durability string
	}
	if err := json.Unmarshal([]byte(first.body), &op); err != nil || op.UserID != user || op.Kind != "add" ||
		op.Amount != 100 || op.Balance != 100 || op.Seq != 1 || op.Durability != "memory" {
		t.Fatalf("got %v, %v", first, err)
	}
	if got := first.header.Get("Idempotent-Replayed") + first.header.Get(idem.KeyHeader); got != "false"+key {
		t.Errorf("headers: %v", first.header)
	}
	again := w.credit("/add/"+user, key, ` {"reference":"gift", "amount":100}`)
	again.replays(t, "the replay", first)
	if again.header.Get("Original-Date") == "" {
		t.Error("no Original-Date")
	}
	want(t, w.credit("/add/"+user, key, `{"amount":100}`), 422, "idempotency_key_reused")
	// A key is valid for one route.
	want(t, w.credit("/deduct/"+user, key, `{"amount":30}`), 200, "")
	short := newKey()
	refused := w.credit("/deduct/"+user, short, `{"amount":71}`)
	want(t, refused, 402, "insufficient_credits")
	testenv.Contains(t, "the refusal", refused.body, `"balance":70,"required":71`)
	want(t, w.credit("/add/"+user, newKey(), `{"amount":1000}`), 200, "")
	w.credit("/deduct/"+user, short, `{"amount":71}`).replays(t, "the repeated refusal", refused)
	balance := func(query string) string {
		body, _, _ := strings.Cut(w.do(http.MethodGet, "/balance/"+user+query, "").body, `,"as_of":"`)
		return body
	}
	const cached = `{"balance":1070,"seq":4,"synced_seq":4,"source":"cache"`
	testenv.Becomes(t, "the balance", cached, func() string { return balance("") })
	testenv.Equal(t, "durable", balance("?consistency=durable"), strings.Replace(cached, "cache", "db", 1))
	want(t, w.do(http.MethodGet, "/balance/"+user+"?consistency=x", ""), 400, "invalid_parameter")
	// The ledger keeps keys forever. A date in the past would suggest that the key may be used again.
	w.db.Exec(t, "UPDATE credit_entries SET created_at = now() - interval '3 days' WHERE op_id = $1", op.OpID)
	w.redis.Client.FlushAll(t.Context())
	testenv.Eventually(t, 20*time.Second, func() error {
		r := w.credit("/add/"+user, key, `{"amount":100,"reference":"gift"}`)
		if r.body != first.body {
			return errors.New(r.body)
		}
		if at, err := http.ParseTime(r.header.Get("Idempotency-Expires")); err != nil || at.Before(time.Now()) {
			t.Errorf("expires %v, %v", at, err)
		}
		return nil
	})
	// The event has the data of the response.
	var data string
	must(t, w.db.Pool.QueryRow(t.Context(),
		`SELECT payload::text FROM outbox WHERE id = $1 AND aggregate_type = 'credits'
		AND aggregate_id = $2 AND event_type = 'credits.added'`, op.OpID, user).Scan(&data))
	if !sameJSON(t, data, first.body) {
		t.Errorf("event %s, want %s", data, first.body)
	}
	header := http.Header{idem.KeyHeader: {newKey()}, "Content-Type": {"application/json"}}
	for _, c := range [][2]string{
		{"/add/", `{"amount":1}`},
		{"/deduct/", `{"amount":1}`},
		{"/deduct/", `{"amount":999999}`},
		{"/deduct/", `{}`},
	} {
		rec, _ := d.exchange(t, w.s.Public(), http.MethodPost, c[0]+user, c[1], header)
		header.Set(idem.KeyHeader, newKey())
		if rec.Code >= 500 {
			t.Errorf("%v: %d", c, rec.Code)
		}
	}
	rec, _ := d.exchange(t, w.s.Public(), http.MethodGet, "/balance/"+user, "", http.Header{})
	testenv.Equal(t, "the balance: status", rec.Code, 200)
}

func sameJSON(tb testing.TB, a, b string) bool {
	tb.Helper()
	var x, y any
	if json.Unmarshal([]byte(a), &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		tb.Fatalf("not JSON: %s, %s", a, b)
	}
	return fmt.Sprint(x) == fmt.Sprint(y)
}

func TestCreditRequestsAreStrict(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	user := uuid.NewString()
	for body, code := range map[string]string{
		`{"amount":-1}`: "validation_failed", `{"amount":0}`: "validation_failed",
		`{"amount":1.0}`: "validation_failed",
		`{"amount":1e3}`: "validation_failed", `{"amount":"1"}`: "validation_failed",
		`{"amount":1000000000000}`: "validation_failed",
		`{"amount":null}`:          "validation_failed", `{}`: "validation_failed",
		`{"amount":1,"x":2}`:         "validation_failed",
		`{"amount":1,"reference":5}`: "validation_failed", `{"amount":1,"reference":"\u0000"}`: "validation_failed",
		`{"amount":1,"reference":null}`: "validation_failed", `{"amount":1,"reference":"` + strings.Repeat("é", 128) +
			`"}`: "validation_failed",
		`{"amount":1,"amount":2}`: "invalid_json", `[1]`: "invalid_json", `{"amount":01}`: "invalid_json",
	} {
		r := w.credit("/add/"+user, newKey(), body)
		if r.code() != code || r.status >= 500 {
			t.Errorf("%s: got %v, want %s", body, r, code)
		}
	}
	want(t, w.do(http.MethodPost, "/add/"+user, `{"amount":1}`), 400, "idempotency_key_missing")
	want(t, w.credit("/add/"+user, "short", `{"amount":1}`), 400, "idempotency_key_invalid")
	want(t, w.credit("/add/nobody", newKey(), `{"amount":1}`), 404, "unknown_user")
	want(t, w.do(http.MethodGet, "/balance/"+user, ""), 404, "unknown_user") // nothing was stored
}

func TestCreditsFailClosed(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	user := uuid.NewString()
	want(t, w.credit("/add/"+user, newKey(), `{"amount":10}`), 200, "")
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	want(t, w.credit("/deduct/"+user, newKey(), `{"amount":1}`), 503, "epoch_recovering")
	must(t, w.redis.Stop())
	for _, r := range []reply{
		w.credit("/deduct/"+user, newKey(), `{"amount":1}`),
		w.credit("/add/"+user, newKey(), `{"amount":1}`), w.do(http.MethodGet, "/balance/"+user, ""),
	} {
		want(t, r, 503, "credits_store_unavailable")
		if r.header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
	}
	want(t, w.post(newKey(), orderJSON(5)), 201, "")
	none := newWorld(t)
	want(t, none.credit("/add/"+user, newKey(), `{"amount":1}`), 503, "credits_store_unavailable")
}

// Balances of another database need an operator: repeating the request cannot help.
func TestTheCreditsOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	must(t, sql.Register(t.Context(), w.db.Pool, w.db.Relay))
	w.redis.Client.Set(t.Context(), "{cr:owner}", uuid.NewString(), 0)
	user := uuid.NewString()
	for _, r := range []reply{
		w.credit("/deduct/"+user, newKey(), `{"amount":1}`),
		w.credit("/add/"+user, newKey(), `{"amount":1}`), w.do(http.MethodGet, "/balance/"+user, ""),
	} {
		want(t, r, 503, "credits_foreign")
		if r.header.Get("Retry-After") != "" || !strings.Contains(r.body, `"retryable":false`) {
			t.Errorf("%v %s: a repeat is asked for", r.header, r.body)
		}
	}
}

// A user's key spends and reads that user's credits. Only a key for any user adds credits.
func TestKeysDecideWhoMayMakeCredits(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false, func(o *Options) { o.Keys = testKeys(t) })
	alice, robot := []string{"Authorization", "Bearer alice-key"}, []string{"Authorization", "Bearer robot-key"}
	post := func(who []string, path, key string) reply {
		return w.do(http.MethodPost, path, `{"amount":5}`, append([]string{idem.KeyHeader, key}, who...)...)
	}
	key := newKey()
	want(t, post(alice, "/add/"+testUser, key), 403, "forbidden")
	want(t, post(alice, "/add/"+otherUser, key), 403, "forbidden")
	want(t, post(robot, "/deduct/"+testUser, newKey()), 404, "unknown_user") // nothing was stored
	want(t, post(robot, "/add/"+testUser, key), 200, "")
	want(t, post(robot, "/add/"+otherUser, newKey()), 200, "")
	want(t, post(alice, "/deduct/"+otherUser, newKey()), 403, "forbidden_user")
	want(t, w.do(http.MethodGet, "/balance/"+otherUser, "", alice...), 403, "forbidden_user")
	want(t, w.do(http.MethodGet, "/balance/"+testUser, "", alice...), 200, "")
	want(t, post(alice, "/deduct/"+testUser, newKey()), 200, "")
	want(t, post(alice, "/deduct/"+testUser, newKey()), 402, "insufficient_credits")
	want(t, post(nil, "/add/"+testUser, newKey()), 401, "unauthorized")
}

// Temporary failures of an account or a bucket have their own status.
func TestCreditsThatHaveToWait(t *testing.T) {
	t.Parallel()
	w := newCreditWorld(t, false)
	user := uuid.NewString()
	w.fund(user, 100)
	w.redis.Client.HSet(t.Context(), accountOf(user), "f", "gap")
	key := newKey()
	want(t, w.credit("/deduct/"+user, key, `{"amount":1}`), 423, "account_frozen")
	w.redis.Client.HDel(t.Context(), accountOf(user), "f")
	// The bucket is full after ten thousand operations without a sync.
	bucket, _, _ := strings.Cut(accountOf(user), ":a:")
	_, err := w.redis.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for range 10_000 {
			p.XAdd(t.Context(), &redis.XAddArgs{Stream: bucket + ":s", Values: []string{"x", "y"}})
		}
		return nil
	})
	must(t, err)
	r := w.credit("/deduct/"+user, key, `{"amount":1}`)
	want(t, r, 429, "backpressure")
	r.has(t, "Retry-After", "1")
	want(t, w.post(newKey(), paidJSON(user, 1)), 429, "backpressure")
	w.redis.Client.XTrimMaxLen(t.Context(), bucket+":s", 1)
	want(t, w.credit("/deduct/"+user, key, `{"amount":1}`), 200, "") // the same key: it deducted nothing before
}
