package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

func TestAnOrderIsPlacedOnceAndReplayed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	first := w.post(key, orderJSON(1250), "Traceparent", trace)
	want(t, first, 201, "")
	o := first.order(t)
	if o.UserID.String() != testUser || o.Amount != 1250 || o.Currency != "USD" || o.Status != "PENDING" ||
		o.ID.Version() != 7 {
		t.Errorf("body %+v", o)
	}
	created, err := time.Parse(timeLayout, o.CreatedAt)
	if err != nil || time.Since(created) > time.Minute {
		t.Errorf("created_at %q", o.CreatedAt)
	}
	for name, want := range map[string]string{
		"Location": "/orders/" + o.ID.String(), "Idempotent-Replayed": "false", "Idempotency-Key": key,
		"Content-Type": "application/json", "Idempotency-Expires": created.Add(24 * time.Hour).Format(http.TimeFormat),
		"Original-Date": "", "Idempotency-Guard": "", "Etag": etag([]byte(first.body)),
	} {
		first.has(t, name, want)
	}
	w.published()
	// The same process, another one, a quoted key, and Postgres alone return the same bytes.
	other := w.sibling()
	replays := []reply{w.post(key, orderJSON(1250)), other.post(`"`+key+`"`, orderJSON(1250))}
	w.redis.Client.FlushAll(t.Context())
	fresh := w.sibling()
	replays = append(replays, fresh.post(key, `{ "currency":"USD", "amount":1250,"user_id":"`+testUser+`" }`))
	for i, r := range replays {
		r.same(t, fmt.Sprintf("replay %d", i), first)
		for name, want := range map[string]string{
			"Idempotent-Replayed": "true", "Original-Date": created.Format(http.TimeFormat), "Location": "/orders/" +
				o.ID.String(),
			"Etag": first.header.Get("Etag"), "Idempotency-Expires": first.header.Get("Idempotency-Expires"),
		} {
			r.has(t, name, want)
		}
	}
	w.checkInvariants(1)
	var typ, agg, subject, payload, headers string
	must(t, w.db.Pool.QueryRow(t.Context(),
		"SELECT event_type, aggregate_type, aggregate_id, payload::text, headers->>'traceparent' FROM outbox").
		Scan(&typ, &agg, &subject, &payload, &headers))
	if typ != "order.created" || agg != "order" || subject != o.ID.String() || headers != trace {
		t.Errorf("event %s %s %s %s", typ, agg, subject, headers)
	}
	if !sameJSON(t, payload, first.body) {
		t.Errorf("payload %s, want %s", payload, first.body)
	}
}

func TestTheSameKeyWithAnotherBodyIsRefusedAlways(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	want(t, w.post(key, orderJSON(1)), 201, "")
	want(t, w.post(key, orderJSON(2)), 422, "idempotency_key_reused")
	w.published()
	want(t, w.sibling().post(key, orderJSON(2)), 422, "idempotency_key_reused")
	w.redis.Client.FlushAll(t.Context())
	fresh := w.sibling()
	want(t, fresh.post(key, orderJSON(2)), 422, "idempotency_key_reused")
	// The refused request released its lease, so the key's owner does not wait.
	want(t, fresh.post(key, orderJSON(1), "Prefer", "wait=0"), 201, "")
	w.checkInvariants(1)
}

func TestReads(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	var posted []string
	for i := range 5 {
		k := newKey()
		if i == 4 {
			k = key
		}
		posted = append([]string{w.post(k, orderJSON(i+1)).body}, posted...)
	}
	last := posted[0]
	var o orderBody
	_ = json.Unmarshal([]byte(last), &o)
	got := w.do("GET", "/orders/"+o.ID.String(), "")
	got.same(t, "get", reply{status: 200, body: last})
	if r := w.do("HEAD", "/orders/"+o.ID.String(), ""); r.status != 200 || r.body != "" ||
		r.header.Get("Etag") != got.header.Get("Etag") ||
		r.header.Get("Content-Length") != got.header.Get("Content-Length") {
		t.Errorf("HEAD: %v %v", r, r.header)
	}
	for _, tag := range []string{got.header.Get("Etag"), "W/" + got.header.Get("Etag"), `"x", ` +
		got.header.Get("Etag"), "*"} {
		if r := w.do("GET", "/orders/"+o.ID.String(), "", "If-None-Match", tag); r.status != 304 || r.body != "" ||
			r.header.Get("Etag") == "" {
			t.Errorf("If-None-Match %s: %v", tag, r)
		}
	}
	testenv.Equal(t, "another tag", w.do("GET", "/orders/"+o.ID.String(), "", "If-None-Match", `"x"`).status, 200)
	for _, id := range []string{uuid.NewString(), "x", "{" + o.ID.String() + "}"} {
		want(t, w.do("GET", "/orders/"+id, ""), 404, "not_found")
	}
	w.do("GET", "/orders/by-key?user_id="+testUser, "", idem.KeyHeader, key).same(t, "by key", got)
	want(t, w.do("GET", "/orders/by-key?user_id="+testUser, "", idem.KeyHeader, newKey()), 404, "not_found")
	want(t, w.do("GET", "/orders/by-key?user_id="+testUser, ""), 400, "idempotency_key_missing")
	want(t, w.do("GET", "/orders/by-key", "", idem.KeyHeader, key), 400, "invalid_parameter")
	w.checkPages(posted)
	for _, q := range []string{
		"", "?user_id=x", "?user_id=" + testUser + "&limit=0", "?user_id=" + testUser + "&limit=201",
		"?user_id=" + testUser + "&limit=x", "?user_id=" + testUser + "&after=x",
	} {
		want(t, w.do("GET", "/orders"+q, ""), 400, "invalid_parameter")
	}
	want(t, w.do("GET", "/nowhere", ""), 404, "not_found")
	r := w.do("DELETE", "/orders", "")
	want(t, r, 405, "method_not_allowed")
	testenv.Contains(t, "Allow", r.header.Get("Allow"), "GET", "POST")
}

// checkPages reads the list in pages of two.
func (w *world) checkPages(posted []string) {
	w.tb.Helper()
	var seen []string
	for path := "/orders?limit=2&user_id=" + testUser; path != ""; {
		r := w.do("GET", path, "")
		var page struct {
			Orders []json.RawMessage `json:"orders"`
			Next   *string           `json:"next"`
		}
		if err := json.Unmarshal([]byte(r.body), &page); r.status != 200 || err != nil {
			w.tb.Fatalf("list: %v, %v", r, err)
		}
		for _, o := range page.Orders {
			seen = append(seen, string(o))
		}
		path = ""
		if page.Next != nil {
			path = "/orders?limit=2&user_id=" + testUser + "&after=" + *page.Next
		}
	}
	if !reflect.DeepEqual(seen, posted) {
		w.tb.Errorf("pages gave %v, want %v", seen, posted)
	}
}

func TestWellKnown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var got struct {
		TTL       int `json:"ttl"`
		MaxLength int `json:"max_length"`
		WaitMax   int `json:"wait_max"`
	}
	r := w.do("GET", "/.well-known/idempotency", "")
	if err := json.Unmarshal([]byte(r.body), &got); err != nil || got.TTL != 86400 || got.MaxLength != 255 ||
		got.WaitMax != 10 {
		t.Errorf("%v", r)
	}
}

func TestAnOldKeyIsReplayedOrRefusedButNotExecuted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	strict := w.sibling(func(o *Options) { o.KeyMaxAge = time.Hour })
	old := uuid.Must(uuid.Parse("018f0000-0000-7000-8000-000000000001")).String() // minted in 2024
	want(t, strict.post(old, orderJSON(1)), 422, "idempotency_key_expired")
	first := w.post(old, orderJSON(1))
	want(t, first, 201, "")
	strict.post(old, orderJSON(1)).replays(t, "an old key with an order", first)
	want(t, strict.post(old, orderJSON(2)), 422, "idempotency_key_reused")
	fresh, err := uuid.NewV7()
	must(t, err)
	want(t, strict.post(fresh.String(), orderJSON(1)), 201, "")
	w.checkInvariants(2)
}

func TestRowsOfAnotherFingerprintVersionAreComparedByTheirColumns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key := newKey()
	first := w.post(key, orderJSON(3))
	want(t, first, 201, "")
	w.published()
	w.redis.Client.FlushAll(t.Context())
	w.db.Exec(t, "UPDATE orders SET idem_fp = '\\x09' || sha256('later')")
	w.post(key, orderJSON(3)).same(t, "again", first)
	w.redis.Client.FlushAll(t.Context())
	want(t, w.sibling().post(key, orderJSON(4)), 422, "idempotency_key_reused")
	n := testenv.Value[int](t, w.db, "SELECT count(*) FROM orders WHERE status = $1", sql.OrderPending)
	testenv.Equal(t, "orders", n, 1)
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
