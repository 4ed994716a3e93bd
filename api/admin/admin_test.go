package admin_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/api/admin"
	"posthaste/cdc"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

type world struct {
	db  *testenv.Database
	url string
	// seen counts the requests that have arrived.
	seen *atomic.Int64
}

func newWorld(t *testing.T, token string, edit ...func(*admin.Options)) *world {
	t.Helper()
	d := testenv.Postgres(t)
	slots, err := cdc.NewSlots(cdc.Options{Pool: d.Pool, Slot: "posthaste_" + d.Relay})
	must(t, err)
	reg := prometheus.NewRegistry()
	relay := relay.New(relay.Options{Registerer: reg})
	o := admin.Options{
		Source: ops.Source{Pool: d.Pool, RelayName: d.Relay, Slots: slots, Relay: relay},
		Ready:  admin.RelayReady(relay), Access: admin.Access{Token: token}, Gatherer: reg, Logger: testenv.Logger(t),
	}
	for _, f := range edit {
		f(&o)
	}
	h := admin.Handler(o)
	seen := new(atomic.Int64)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen.Add(1)
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return &world{db: d, url: srv.URL, seen: seen}
}

func (w *world) call(t *testing.T, method, path, body string, header ...string) (int, string) {
	t.Helper()
	a, err := testenv.Request(t.Context(), method, w.url+path, body, header...)
	must(t, err)
	return a.Status, string(a.Body)
}

// expect is call for an answer with a status. It returns the body.
func (w *world) expect(t *testing.T, want int, method, path, body string, header ...string) string {
	t.Helper()
	status, answer := w.call(t, method, path, body, header...)
	if status != want {
		t.Errorf("%s %s %.30s %q: %d %.80s, want %d", method, path, body, header, status, answer, want)
	}
	return answer
}

func TestModeIsSetBeforeTheFirstRelayAndShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	testenv.Contains(t, "set", w.expect(t, 200, "PUT", "/relay/mode", `{"mode":"poll"}`), `"desired":"poll"`)
	body := w.expect(t, 200, "GET", "/relay", "")
	var st ops.Status
	must(t, json.Unmarshal([]byte(body), &st))
	if st.Desired != outbox.ModePoll || st.Mode != outbox.ModeStandby || st.Leader == nil || *st.Leader ||
		st.Inflight == nil || st.Slot.Exists {
		t.Errorf("status: %s", body)
	}
	for body, want := range map[string]int{
		`{"mode":"fast"}`: 422, `{}`: 422, `nonsense`: 400,
		`{"mode":"poll","more":1}`: 400, strings.Repeat(" ", 5000): 400,
	} {
		w.expect(t, want, "PUT", "/relay/mode", body)
	}
}

// The relay of this process does not run. GET /relay reports that like posthaste status, /readyz with its own reasons.
func TestTheVerdictIsInTheAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	w.call(t, "PUT", "/relay/mode", `{"mode":"auto"}`)
	body := w.expect(t, 200, "GET", "/relay", "")
	var r ops.Report
	must(t, json.Unmarshal([]byte(body), &r))
	want := ops.Brief{
		Word: "broken", Why: "No relay publishes: Events wait in Postgres and none is lost",
		Remedy: "Start one: posthaste relay. If it is running, its log says why it does not lead.",
		Also:   []string{"This relay is not ready: postgres: not connected yet"},
	}
	if !reflect.DeepEqual(r.Verdict, want) || r.Desired != outbox.ModeAuto {
		t.Errorf("the answer is %s", body)
	}
	w.expect(t, 503, "GET", "/readyz", "")
}

// A process without a relay, like serve, queries Redis itself.
func TestWithoutARelayRedisIsAsked(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	slots, err := cdc.NewSlots(cdc.Options{Pool: d.Pool, Slot: "posthaste_" + d.Relay})
	must(t, err)
	must(t, ops.SetMode(t.Context(), d.Pool, d.Relay, outbox.ModeAuto))
	// Take the leader's lock: a missing leader would otherwise be reported before Redis.
	lock, err := d.Pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = lock.Rollback(context.Background()) })
	const leads = "SELECT pg_advisory_xact_lock(hashtextextended('posthaste leader ' || 'outbox'::regclass::oid, 0))"
	_, err = lock.Exec(t.Context(), leads)
	must(t, err)
	for want, err := range map[string]error{
		`{"word":"ok","why":"a relay is starting"}`: nil,
		`{"word":"degraded","why":"Redis does not take events: Redis unreachable: no answer. `: errors.New(
			"redis unreachable:\nno answer"),
	} {
		h := admin.Handler(admin.Options{
			Source: ops.Source{
				Pool: d.Pool, RelayName: d.Relay, Slots: slots, Redis: func(context.Context) error { return err },
			},
			Ready: http.NotFoundHandler(), Gatherer: prometheus.NewRegistry(),
		})
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/relay", nil))
		testenv.Equal(t, "status", rec.Code, 200)
		testenv.Contains(t, "the answer", rec.Body.String(), `"verdict":`+want, `"leader":null`)
	}
}

// With a token configured, only health and metrics are open. The read token changes nothing.
func TestReadingNeedsATokenToo(t *testing.T) {
	t.Parallel()
	console := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) })
	w := newWorld(t, "secret", func(o *admin.Options) { o.Console, o.ReadToken, o.Profiles = console, "look", true })
	w.call(t, "PUT", "/relay/mode", `{"mode":"auto"}`, "Authorization", "Bearer secret")
	for path, want := range map[string]int{
		"/relay": 200, "/relay/dead": 200, "/console/api/state": 418, "/debug/pprof/": 200, "/debug/pprof/heap": 200,
	} {
		for auth, want := range map[string]int{
			"": 401, "Bearer wrong": 401, "Bearer ": 401, "look": 401, "Bearer look": want, "Bearer secret": want,
		} {
			w.expect(t, want, "GET", path, "", "Authorization", auth)
		}
	}
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/console/": 418} {
		w.expect(t, want, "GET", path, "")
	}
	for _, c := range []struct{ method, path string }{
		{"PUT", "/relay/mode"}, {"DELETE", "/relay/dead/" + uuid.NewString()}, {"PUT", "/console/api/mode"},
	} {
		w.expect(t, 403, c.method, c.path, `{"mode":"poll"}`, "Authorization", "Bearer look")
	}
}

// Profiles need the setting, have a maximum duration, and never show the command line.
func TestProfiles(t *testing.T) {
	t.Parallel()
	for on, want := range map[bool]map[string]int{
		false: {"": 200, "heap": 404, "profile?seconds=1": 404, "cmdline": 404},
		true: {
			"": 200, "heap": 200, "cmdline": 404, "profile?seconds=31": 400, "trace?seconds=1e9": 400,
			"heap?seconds=-1": 400, "profile?seconds=NaN": 400, "trace?seconds=0.01": 200,
		},
	} {
		w := newWorld(t, "", func(o *admin.Options) { o.Profiles = on })
		for path, want := range want {
			w.expect(t, want, "GET", "/debug/pprof/"+path, "")
		}
	}
}

func TestOtherOriginsAreRefused(t *testing.T) {
	t.Parallel()
	console := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) })
	w := newWorld(t, "", func(o *admin.Options) { o.Console = console })
	for _, h := range [][]string{
		{"Origin", "https://evil.example"}, {"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Site", "same-site"},
	} {
		w.expect(t, 403, "PUT", "/relay/mode", `{"mode":"poll"}`, h...)
		for _, path := range []string{"/relay", "/relay/dead", "/debug/pprof/", "/console/api/state"} {
			w.expect(t, 403, "GET", path, "", h...)
		}
		// A link from another origin may lead to the page.
		for path, want := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 200, "/console/": 418} {
			w.expect(t, want, "GET", path, "", h...)
		}
	}
	w.call(t, "PUT", "/relay/mode", `{"mode":"auto"}`)
	for _, h := range [][]string{{"Sec-Fetch-Site", "none"}, {"Sec-Fetch-Site", "same-origin"}, {"Origin", w.url}} {
		w.expect(t, 200, "GET", "/relay", "", h...)
	}
}

// Concurrent reads share one query: one connection and one round of statements.
func TestManyWhoReadCostOneLook(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	w.call(t, "PUT", "/relay/mode", `{"mode":"auto"}`)
	before := w.db.Pool.Stat().AcquireCount()
	w.expect(t, 200, "GET", "/relay", "")
	one := w.db.Pool.Stat().AcquireCount() - before
	lock, err := w.db.Pool.Begin(t.Context())
	must(t, err)
	_, err = lock.Exec(t.Context(), "LOCK TABLE outbox, outbox_dead")
	must(t, err)
	const many = 20
	answers := make(chan int, 2*many)
	for _, path := range []string{"/relay", "/relay/dead"} {
		for range many {
			go func() {
				status, _ := w.call(t, "GET", path, "")
				answers <- status
			}()
		}
	}
	begun := w.db.Pool.Stat().AcquireCount()
	testenv.Becomes(t, "requests that arrived", 2+2*many, w.seen.Load)
	if n := w.db.Pool.Stat().AcquiredConns(); n > 3 { // the lock's, and one for each path
		t.Errorf("%d connections in use", n)
	}
	must(t, lock.Rollback(t.Context()))
	for range 2 * many {
		testenv.Equal(t, "status", <-answers, 200)
	}
	if took := w.db.Pool.Stat().AcquireCount() - begun; took > 2*one+2 {
		t.Errorf("%d connections were taken, and %d for one look", took, one)
	}
}

// under returns the status of a request to a listener under a host name, from a page of origin if that is not "".
func under(t *testing.T, access admin.Access, method, path, host, origin string) int {
	t.Helper()
	access.Hosts = []string{"named.example"}
	h := admin.Handler(admin.Options{
		Ready: http.NotFoundHandler(), Gatherer: prometheus.NewRegistry(), Access: access,
	})
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("nonsense"))
	r.Host = host
	if origin != "" {
		r.Header.Set("Origin", origin)
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, r)
	return rec.Code
}

// DNS rebinding: a page of another host whose name resolves to 127.0.0.1 is same-origin for a browser.
func TestALoopbackListenerAnswersForLoopbackNamesOnly(t *testing.T) {
	t.Parallel()
	get := func(bound net.Addr, asked, host string) int {
		return under(t, admin.Access{Bound: bound, Addr: asked}, http.MethodGet, "/healthz", host, "")
	}
	loopback := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9091}
	for host, want := range map[string]int{
		"127.0.0.1:9091": 200, "127.0.0.1": 200, "[::1]:9091": 200, "localhost:9091": 200, "LOCALHOST": 200,
		"relay.localhost": 200, "127.8.8.8": 200, "named.example:1": 200,
		"evil.example": 421, "evil.example:9091": 421, "localhost.evil.example": 421, "10.0.0.1": 421, "": 421,
		"127.0.0.1.evil.example": 421,
	} {
		testenv.Equal(t, "Host "+host, get(loopback, "127.0.0.1:9091", host), want)
	}
	named := get(loopback, "relay.internal:9091", "relay.internal:9091")
	testenv.Equal(t, "the name that the operator bound", named, 200)
	every := &net.TCPAddr{IP: net.IPv4zero, Port: 9091}
	testenv.Equal(t, "not on loopback", get(every, "0.0.0.0:9091", "relay.example"), 200)
}

// In a container the listener is on every address, and the port is published on the host's loopback. A foreign name
// that resolves to it must change nothing, while curl and other containers, which use the service's name, may.
func TestReboundNamesChangeNothingOnOtherAddresses(t *testing.T) {
	t.Parallel()
	put := func(token, asked, host, origin string) int {
		every := &net.TCPAddr{IP: net.IPv6unspecified, Port: 9091}
		return under(t, admin.Access{Token: token, Addr: asked, Bound: every}, http.MethodPut, "/relay/mode", host,
			origin)
	}
	for host, want := range map[string]int{
		"evil.example:9091": 421, "evil.example": 421, "EVIL.example.": 421, "127.0.0.1.evil.example:9091": 421,
		"a..b":       421,
		"relay:9091": 400, "127.0.0.1:9091": 400, "10.1.2.3:9091": 400, "[fd00::1]:9091": 400, "[::1]:9091": 400,
		"localhost:9091": 400, "relay.localhost": 400, "named.example": 400, "": 421,
	} {
		testenv.Equal(t, "a page of "+host, put("", "0.0.0.0:9091", host, "http://"+host), want)
		// A same-origin page sends no Origin when it reads, and curl never does.
		testenv.Equal(t, "without an origin, to "+host, put("", "0.0.0.0:9091", host, ""), want)
	}
	bound := put("", "ops.example:9091", "ops.example:9091", "http://ops.example:9091")
	testenv.Equal(t, "the name that the operator bound", bound, 400)
	// The token decides.
	testenv.Equal(t, "behind a proxy", put("secret", "0.0.0.0:9091", "ops.example", "https://ops.example"), 401)
}

func TestDeadEventsAreListedRetriedAndDropped(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	first, second, unread := uuid.New(), uuid.New(), uuid.New()
	for i, id := range []uuid.UUID{first, second, unread} {
		var payload any = `{"a":1}`
		if id == unread {
			payload = nil
		}
		w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, `+
			`created_at, error, class, attempts)
			VALUES ($1, $2, 'order', 'a', 'x', $3::text::jsonb, now(), 'refused', 'wrongtype', 3)`, id, i+1, payload)
	}
	status, body := w.call(t, "GET", "/relay/dead", "")
	var list struct{ Dead []ops.Dead }
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != 200 || len(list.Dead) != 3 ||
		list.Dead[0].ID != first || list.Dead[0].Source != "relay" {
		t.Fatalf("list: %d %s %v", status, body, err)
	}
	if strings.Contains(body, `"a":1`) {
		t.Error("the list shows payloads")
	}
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"POST", "/relay/dead/" + first.String() + "/retry", 202},
		{"POST", "/relay/dead/" + first.String() + "/retry", 202},
		{"DELETE", "/relay/dead/" + second.String(), 202},
		{"DELETE", "/relay/dead/" + second.String(), 404},
		{"POST", "/relay/dead/" + second.String() + "/retry", 404},
		{"POST", "/relay/dead/" + unread.String() + "/retry", 409},
		{"POST", "/relay/dead/nonsense/retry", 400},
	} {
		w.expect(t, c.want, c.method, c.path, "")
	}
	n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox WHERE id = $1", first)
	testenv.Equal(t, "rows of an event that was retried twice", n, 1)
	// Once the events are published, the relay's housekeeping removes the dead rows, and not before.
	store := sql.NewStore(w.db.Pool, w.db.Relay, 0)
	if n, err := store.Housekeep(t.Context()); err != nil || n != 2 {
		t.Errorf("before it is published: %d parked, %v, want 2", n, err)
	}
	w.db.Exec(t, "DELETE FROM outbox WHERE id = $1", first)
	if n, err := store.Housekeep(t.Context()); err != nil || n != 1 {
		t.Errorf("after it is published: %d parked, %v, want 1", n, err)
	}
}

func TestHealthMetricsAndProfiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	for path, want := range map[string]string{
		"/healthz": "ok", "/metrics": `outbox_relay_mode{mode="standby"} 1`, "/debug/pprof/": "goroutine",
	} {
		testenv.Contains(t, path, w.expect(t, 200, "GET", path, ""), want)
	}
	// The relay does not run, so its health has no state of Postgres.
	testenv.Contains(t, "/readyz", w.expect(t, 503, "GET", "/readyz", ""), `"role":"standby"`, "reasons")
	w.expect(t, 404, "GET", "/nowhere", "")
}

func TestWithoutPostgresTheAnswerIsOneLine(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "")
	w.db.Pool.Close()
	status, body := w.call(t, "GET", "/relay", "")
	if status != 503 || !strings.Contains(body, "detail") {
		t.Errorf("%d %s", status, body)
	}
	if err := ops.SetMode(context.Background(), w.db.Pool, "x", outbox.ModePoll); err == nil {
		t.Error("no error without Postgres")
	}
}

// A value that JSON cannot represent is an error of the server, not an answer.
func TestAnAnswerThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	admin.Answer(w, http.StatusOK, time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC))
	if w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), `"detail"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

var must = testenv.Must
