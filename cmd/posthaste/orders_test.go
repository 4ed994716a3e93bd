package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

// placed is a response to POST /orders.
type placed struct {
	status int
	body   []byte
	trace  string
}

// placeOrder posts one order with its own key. Like a client, it repeats the request if the response permits that: with
// many concurrent orders on a slow machine, some wait too long for a connection.
func placeOrder(ctx context.Context, base string, amount int) (placed, error) {
	body := fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"USD"}`, uuid.NewString(), amount)
	trace := fmt.Sprintf("00-%s-00f067aa0ba902b7-01", strings.ReplaceAll(uuid.NewString(), "-", ""))
	key := strconv.Quote(uuid.NewString())
	for until := time.Now().Add(20 * time.Second); ; {
		a, err := testenv.Request(ctx, http.MethodPost, base+"/orders", body, "Idempotency-Key", key,
			"Traceparent", trace)
		again := a.Status == http.StatusServiceUnavailable || a.Status == http.StatusConflict
		if err != nil || !again || time.Now().After(until) {
			return placed{a.Status, a.Body, trace}, err
		}
		_ = pause.For(ctx, 50*time.Millisecond)
	}
}

func TestConcurrentOrdersBecomeEventsExactlyOnce(t *testing.T) {
	t.Parallel()
	const orders = 200
	w := newWorld(t)
	w.spawn("relay")
	api := w.spawn("serve")
	heard := w.redis.Client.Subscribe(t.Context(), "order.created")
	defer heard.Close()
	_, err := heard.Receive(t.Context())
	must(t, err)
	messages := heard.Channel()
	began := time.Now()
	answers := map[string]placed{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range orders {
		wg.Go(func() {
			a, err := placeOrder(t.Context(), api.http, i+1)
			var order struct{ ID string }
			if err != nil || a.status != http.StatusCreated || json.Unmarshal(a.body, &order) != nil {
				t.Errorf("order %d: status %d, %v: %s", i, a.status, err, a.body)
				return
			}
			mu.Lock()
			answers[order.ID] = a
			mu.Unlock()
		})
	}
	wg.Wait()
	w.oracle.WaitEmpty(t, 20*time.Second)
	if len(answers) != orders {
		t.Fatalf("%d orders, want %d", len(answers), orders)
	}
	ids := map[string]bool{}
	for _, m := range rawEntries(t, w, "outbox.order") {
		subject := m["subject"]
		a, ok := answers[subject]
		if !ok {
			t.Fatalf("event for order %q, which nobody placed, or its second", subject)
		}
		checkOrderEvent(t, w, m, a)
		delete(answers, subject)
		ids[m["id"]] = true
	}
	if len(answers) > 0 || len(ids) != orders {
		t.Errorf("%d orders without event, %d event ids", len(answers), len(ids))
	}
	w.has(orders, "SELECT count(DISTINCT id) FROM outbox_history")
	for range orders {
		select {
		case m := <-messages:
			if !json.Valid([]byte(m.Payload)) {
				t.Fatalf("message %q", m.Payload)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("not every event was heard on its channel")
		}
	}
	t.Logf("%d orders placed, streamed and settled in %v", orders, time.Since(began).Round(time.Millisecond))
}

// rawEntries returns the fields of a stream's entries.
func rawEntries(t *testing.T, w *world, stream string) []map[string]string {
	t.Helper()
	list, err := w.redis.Client.XRange(t.Context(), stream, "-", "+").Result()
	must(t, err)
	out := make([]map[string]string, len(list))
	for i, m := range list {
		out[i] = map[string]string{}
		for k, v := range m.Values {
			out[i][k], _ = v.(string)
		}
	}
	return out
}

var eventTime = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`)

// checkOrderEvent compares an entry's fields with the contract and with the client's response.
func checkOrderEvent(t *testing.T, w *world, m map[string]string, a placed) {
	t.Helper()
	if len(m) != 8 || m["specversion"] != "1.0" {
		t.Errorf("fields %v, want id, type, source, subject, time, data, specversion, traceparent", m)
	}
	if _, err := uuid.Parse(m["id"]); err != nil {
		t.Errorf("id %q", m["id"])
	}
	if m["type"] != "order.created" || m["source"] != "/posthaste/"+w.db.Relay {
		t.Errorf("type %q, source %q", m["type"], m["source"])
	}
	at, err := time.Parse(time.RFC3339, m["time"])
	if err != nil || !eventTime.MatchString(m["time"]) || time.Since(at).Abs() > 10*time.Minute {
		t.Errorf("time %q", m["time"])
	}
	// The span is the server's, and the trace is the client's.
	if !strings.HasPrefix(m["traceparent"], a.trace[:36]) {
		t.Errorf("traceparent %q, the client's was %q", m["traceparent"], a.trace)
	}
	var data, body map[string]any
	if json.Unmarshal([]byte(m["data"]), &data) != nil || json.Unmarshal(a.body, &body) != nil ||
		fmt.Sprint(data) != fmt.Sprint(body) {
		t.Errorf("data %s, the answer was %s", m["data"], a.body)
	}
}
