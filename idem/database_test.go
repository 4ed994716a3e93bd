package idem

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"posthaste/internal/lab/testenv"
)

// database is in an incarnation; seen is the one that it was last seen in.
type database struct {
	mu       sync.Mutex
	now      string
	seen     string
	question int
}

func (d *database) Last(context.Context) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seen
}

func (d *database) Confirmed(context.Context) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = d.now
	d.question++
	return d.now
}

func (d *database) goes(to string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now = to
}

func of(d *database) func(*Options) { return func(o *Options) { o.Database = d } }

func TestARecordIsOfOneIncarnation(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	here, there := &database{now: "a", seen: "a"}, &database{now: "b", seen: "b"}
	g, other := guardOn(t, r.URL(), of(here)), guardOn(t, r.URL(), of(there))
	first := begin(t, g, request("k", "a"))
	wantOutcome(t, first, Proceed)
	// Not even the lease is seen.
	second := begin(t, other, request("k", "b"))
	wantOutcome(t, second, Proceed)
	first.Ticket.Commit(t.Context(), Record{Status: 201, Ref: "of a", Incarnation: "a"})
	second.Ticket.Commit(t.Context(), Record{Status: 201, Ref: "of b"})
	for _, g := range []*Guard{g, guardOn(t, r.URL(), of(here))} {
		replays(t, g, request("k", "a"), Record{Status: 201, Ref: "of a"})
	}
	wantOutcome(t, begin(t, other, request("k", "a")), Mismatch)
	// The guard has seen a, and the database is b by now: neither a's record nor its mismatch is final.
	here.goes("b")
	wantOutcome(t, begin(t, g, request("k", "a")), Mismatch)
	here.seen = "a"
	if d := begin(t, g, request("k", "b")); d.Outcome != Replay || d.Record.Ref != "of b" {
		t.Errorf("%+v", d)
	}
	here.goes("c")
	d := begin(t, g, request("k", "b"))
	wantGuarded(t, d, true)
	// New work does not query the database.
	n := here.question
	wantOutcome(t, begin(t, g, request("new", "a")), Proceed)
	testenv.Equal(t, "questions before new work", here.question, n)
}

func TestWhatWasCommittedElsewhereIsNotPublished(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL(), of(&database{now: "b", seen: "b"}))
	d := begin(t, g, request("k", "a"))
	d.Ticket.Commit(t.Context(), Record{Status: 201, Ref: "of a", Incarnation: "a"})
	testenv.Equal(t, "record", rawRecord(t, r.Client, d.Ticket.key), "")
	wantOutcome(t, begin(t, g, request("k", "a")), Proceed)
}

func TestWithoutAKnownDatabaseRedisIsNotUsed(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL(), of(&database{}))
	d := begin(t, g, request("k", "a"))
	wantGuarded(t, d, false)
	d.Ticket.Commit(t.Context(), result)
	wantOutcome(t, begin(t, g, request("k", "a")), Proceed)
	testenv.Equal(t, "keys of Redis", r.Client.DBSize(t.Context()).Val(), 0)
}

// A handler gets the key of the request, which the database keeps for longer than an incarnation; its response is kept
// for the incarnation only.
func TestAHandlersKeyIsThatOfNoIncarnation(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	db := &database{now: "a", seen: "a"}
	g := guardOn(t, r.URL(), of(db))
	var keys []Key
	h := g.Handler(HTTPOptions{Route: "/t", Scope: func(*http.Request) string { return "u" }}, http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			k, _, _ := KeyFrom(r.Context())
			keys = append(keys, k)
			if len(keys) < 3 { // then its body is in the record
				SetRef(r.Context(), "row")
			}
			w.WriteHeader(http.StatusCreated)
		}))
	post := func() string {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/t", strings.NewReader("{}"))
		req.Header.Set(KeyHeader, "0123456789abcdef")
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		return rec.Header().Get("Idempotent-Replayed")
	}
	post()
	post() // without Render, the handler answers from the row
	db.goes("b")
	testenv.Equal(t, "a response of a is replayed in b", post(), "false")
	testenv.Equal(t, "the response is replayed in b", post(), "true")
	want := NewKey("u", http.MethodPost, "/t", "0123456789abcdef")
	if len(keys) != 3 || keys[0] != want || keys[1] != want || keys[2] != want {
		t.Errorf("keys %v, want three times %v", keys, want)
	}
}
