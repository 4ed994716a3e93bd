package console_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/cdc"
	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

type world struct {
	t     *testing.T
	db    *testenv.Database
	redis *testenv.RedisServer
	url   string
	csrf  string
}

// newWorld runs a console as serve has it: over real servers, behind the admin listener, without a relay.
func newWorld(t *testing.T, change func(o *console.Options)) *world {
	t.Helper()
	w := &world{t: t, db: testenv.Postgres(t), redis: testenv.Redis(t)}
	config, err := sql.PoolConfig(w.db.URL, "public", "console")
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = console.Conns
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	client, err := sink.NewClient(w.redis.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	slots, err := cdc.NewSlots(cdc.SlotsOptions{Pool: pool, Slot: "posthaste_" + w.db.Relay})
	if err != nil {
		t.Fatal(err)
	}
	o := console.Options{
		Kind: "serve", RelayName: w.db.Relay, StreamPrefix: "outbox.", Pool: pool, Redis: client, Slots: slots, Gatherer: prometheus.NewRegistry(),
		Doctor: admin.DoctorOptions{
			PostgresURL: w.db.URL, RedisURL: w.redis.URL(), Schema: "public", RelayName: w.db.Relay, Slot: "posthaste_" + w.db.Relay,
			Publication: "posthaste", WALBudget: 1 << 30, StreamMaxlen: 1000, History: time.Hour,
		},
		Logger: testenv.Logger(t),
	}
	if change != nil {
		change(&o)
	}
	c := console.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	srv := httptest.NewUnstartedServer(admin.Handler(admin.Options{
		Pool: pool, RelayName: w.db.Relay, Slots: slots, Ready: http.NotFoundHandler(), Token: o.Token, Gatherer: o.Gatherer, Console: c,
	}))
	srv.Config.ReadTimeout = 2 * time.Second // the stream has to outlive it
	srv.Config.IdleTimeout = time.Minute     // or a request may meet a connection that the server is closing
	srv.Start()
	w.url = srv.URL
	t.Cleanup(func() {
		cancel() // cuts the viewers off; the server could not close otherwise
		if err := <-done; err != nil {
			t.Error(err)
		}
		srv.Close()
	})
	var session struct{ CSRF string }
	if status := w.get("/console/api/session", &session); status != 200 || session.CSRF == "" {
		t.Fatalf("session: %d", status)
	}
	w.csrf = session.CSRF
	return w
}

func (w *world) get(path string, into any) int {
	w.t.Helper()
	status, body := w.call("GET", path, "")
	if into != nil {
		if err := json.Unmarshal([]byte(body), into); err != nil {
			w.t.Fatalf("%s: %v: %s", path, err, body)
		}
	}
	return status
}

func (w *world) call(method, path, body string, header ...string) (int, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// viewer reads the event stream.
type viewer struct {
	resp  *http.Response
	lines *bufio.Scanner
}

func (w *world) view() *viewer {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+"/console/api/stream", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { cancel(); resp.Body.Close() })
	v := &viewer{resp: resp, lines: bufio.NewScanner(resp.Body)}
	v.lines.Buffer(nil, 4<<20)
	return v
}

// next returns the data of the next message with the name; an error when the stream has ended.
func (v *viewer) next(name string) (string, error) {
	event := ""
	for v.lines.Scan() {
		line := v.lines.Text()
		if e, ok := strings.CutPrefix(line, "event: "); ok {
			event = e
		}
		if d, ok := strings.CutPrefix(line, "data: "); ok && event == name {
			return d, nil
		}
	}
	return "", errors.Join(io.EOF, v.lines.Err())
}

// until reads states until cond holds, which it must within so many.
func (v *viewer) until(t *testing.T, what string, cond func(console.State) bool) console.State {
	t.Helper()
	for range 40 {
		d, err := v.next("state")
		if err != nil {
			t.Fatalf("%s: the stream ended: %v", what, err)
		}
		var s console.State
		if err := json.Unmarshal([]byte(d), &s); err != nil {
			t.Fatal(err)
		}
		if cond(s) {
			return s
		}
	}
	t.Fatalf("%s: not in 40 states", what)
	return console.State{}
}

func TestThePageBringsEverythingAndAllowsNothingElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	resp, err := http.Get(w.url + "/console/") //nolint:noctx // ends with the server
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	csp := resp.Header.Get("Content-Security-Policy")
	if !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") || strings.Contains(csp, "http") || !strings.Contains(csp, "frame-ancestors 'none'") {
		t.Errorf("policy: %s", csp)
	}
	page, err := io.ReadAll(resp.Body)
	if err != nil || strings.Contains(string(page), "style=") || strings.Contains(string(page), "://") || strings.Contains(string(page), "onclick=") {
		t.Errorf("the page has inline style or script, or loads from elsewhere: %v", err)
	}
	for _, path := range []string{"console.js", "console.css", "pipeline.js", "chart.js", "util.js", "theme.js", "icon.svg"} {
		if status, _ := w.call("GET", "/console/"+path, ""); status != 200 {
			t.Errorf("%s: %d", path, status)
		}
	}
	if status, body := w.call("GET", "/", ""); status != 200 || !strings.Contains(body, "<title>posthaste") {
		t.Errorf("the listener's root does not lead to the console: %d", status)
	}
}

func TestChangesNeedTheTokenOfThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	id := uuid.NewString()
	for _, c := range []struct{ method, path, body string }{
		{"PUT", "/console/api/mode", `{"mode":"poll"}`}, {"POST", "/console/api/dead/retry", `{"ids":["` + id + `"]}`}, {"POST", "/console/api/dead/drop", `{"ids":["` + id + `"]}`},
	} {
		for _, token := range []string{"", "wrong", w.csrf + "x"} {
			if status, _ := w.call(c.method, c.path, c.body, "X-Posthaste-Csrf", token); status != 403 {
				t.Errorf("%s with %q: %d, want 403", c.path, token, status)
			}
		}
		if status, _ := w.call(c.method, c.path, c.body, "X-Posthaste-Csrf", w.csrf, "Origin", "https://evil.example"); status != 403 {
			t.Errorf("%s from another origin: %d, want 403", c.path, status)
		}
		if status, body := w.call(c.method, c.path, c.body, "X-Posthaste-Csrf", w.csrf); status != 200 {
			t.Errorf("%s: %d %s", c.path, status, body)
		}
	}
	if st, err := sql.ReadState(t.Context(), w.db.Pool, w.db.Relay); err != nil || st.Desired != outbox.ModePoll {
		t.Errorf("desired %v, %v", st.Desired, err)
	}
	for body, want := range map[string]int{`{"mode":"fast"}`: 422, `nonsense`: 400, `{"mode":"poll","x":1}`: 400} {
		if status, _ := w.call("PUT", "/console/api/mode", body, "X-Posthaste-Csrf", w.csrf); status != want {
			t.Errorf("%s: %d, want %d", body, status, want)
		}
	}
	// What curl does stays as it is.
	if status, body := w.call("PUT", "/relay/mode", `{"mode":"auto"}`); status != 200 {
		t.Errorf("the contract's call: %d %s", status, body)
	}
}

func TestChangesNeedTheAdminTokenToo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *console.Options) { o.Token = "secret" })
	for _, auth := range []string{"", "Bearer wrong", "secret", "Bearer "} {
		if status, _ := w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf, "Authorization", auth); status != 401 {
			t.Errorf("with %q: %d, want 401", auth, status)
		}
	}
	if status, _ := w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf, "Authorization", "Bearer secret"); status != 200 {
		t.Errorf("with both: %d", status)
	}
	if _, body := w.call("GET", "/console/api/session", ""); strings.Contains(body, "secret") || !strings.Contains(body, `"token_required":true`) {
		t.Errorf("session: %s", body)
	}
}

func TestEventsComeWithoutTheirPayload(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream VALUES ('outbox.order', 0)")
	v := w.view()
	v.until(t, "both servers answer", func(s console.State) bool {
		return s.Postgres.AsOf != nil && s.Redis.AsOf != nil && s.Streams.AsOf != nil
	})
	values := []any{"id", uuid.NewString(), "type", "order.created", "subject", "o-1", "time", "2026-01-01T00:00:00.000000Z", "data", `{"card":"4111"}`}
	if err := w.redis.Client.Do(t.Context(), append([]any{"XADD", "outbox.order", "*"}, values...)...).Err(); err != nil {
		t.Fatal(err)
	}
	d, err := v.next("events")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(d, `"subject":"o-1"`) || !strings.Contains(d, `"stream":"outbox.order"`) || strings.Contains(d, "4111") {
		t.Errorf("events: %s", d)
	}
	if _, body := w.call("GET", "/console/api/history", ""); !strings.Contains(body, "o-1") || strings.Contains(body, "4111") {
		t.Errorf("history: %s", body)
	}
	// Large ones cost Redis as much as a few small ones: the newest are shown.
	values[9] = strings.Repeat("x", 400<<10)
	_, err = w.redis.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		for range 10 {
			p.Do(t.Context(), append([]any{"XADD", "outbox.order", "*"}, values...)...)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if d, err = v.next("events"); err != nil || strings.Count(d, `"stream":"outbox.order"`) != 3 {
		t.Errorf("%d of ten large events are shown, want 3: %v", strings.Count(d, `"stream":"outbox.order"`), err)
	}
}

// The stream has to go on for longer than the server's read timeout, which is meant for requests.
func TestViewersAreBoundedAndTheStreamOutlivesTheReadTimeout(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	first := w.view()
	for i := 1; i < 16; i++ {
		if v := w.view(); v.resp.StatusCode != 200 {
			t.Fatalf("viewer %d: %d", i, v.resp.StatusCode)
		}
	}
	if v := w.view(); v.resp.StatusCode != 503 || v.resp.Header.Get("Retry-After") == "" {
		t.Errorf("one more: %d", v.resp.StatusCode)
	}
	began := time.Now()
	first.until(t, "seconds later", func(console.State) bool { return time.Since(began) > 4*time.Second })
}

// A server that takes the connection and says nothing more must show as such, and hold up nobody.
func TestAHungServerShowsAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	v := w.view()
	v.until(t, "all well", func(s console.State) bool { return s.Redis.AsOf != nil && s.Postgres.AsOf != nil })
	if err := w.redis.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.redis.Signal(syscall.SIGCONT) })
	began := time.Now()
	s := v.until(t, "Redis hangs", func(s console.State) bool { return s.Redis.Error != "" })
	if s.Verdict.Level != "bad" || s.Verdict.Parts["redis"] != "bad" || s.Postgres.Error != "" || s.Redis.Since == nil || s.Redis.AsOf == nil {
		t.Errorf("state: %+v", s)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("noticed after %v", took)
	}
	// Postgres goes on being asked meanwhile.
	asOf := *s.Postgres.AsOf
	v.until(t, "Postgres is asked", func(s console.State) bool { return s.Postgres.AsOf.After(asOf) })
	// So does everything that needs no Redis, and what needs it answers all the same.
	if status := w.get("/console/api/state", &console.State{}); status != 200 {
		t.Errorf("state: %d", status)
	}
	var d admin.Diagnosis
	if status := w.get("/console/api/doctor", &d); status != 200 || d.OK {
		t.Errorf("doctor: %d %+v", status, d)
	}
	if err := w.redis.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	v.until(t, "Redis is back", func(s console.State) bool { return s.Redis.Error == "" })
}

// A backlog of hours takes longer to count than a page waits, and a table may be locked. Postgres is there all the same, and
// to say that nothing can be ordered would send the operator to the wrong place.
func TestAPostgresThatIsSlowIsNotGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	tx, err := w.db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	v := w.view()
	// On a busy machine a look may miss even the ping that tells the two apart; the next does not.
	s := v.until(t, "a slow Postgres", func(s console.State) bool { return s.Postgres.Slow })
	if s.Verdict.Title != "Postgres is too slow to be asked" || s.Postgres.Error == "" || s.Verdict.Level != "bad" {
		t.Errorf("verdict: %+v", s.Verdict)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	v.until(t, "an answer", func(s console.State) bool { return s.Postgres.Error == "" && s.Postgres.AsOf != nil })
}

// Traces and actions that wait for a lock must not make Postgres look as if it did not answer.
func TestWhatWaitsDoesNotStarveTheRest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	v := w.view()
	v.until(t, "an answer", func(s console.State) bool { return s.Postgres.AsOf != nil })
	tx, err := w.db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	for _, stmt := range []string{"LOCK TABLE outbox_history IN ACCESS EXCLUSIVE MODE", "SELECT FROM relay_state FOR UPDATE"} {
		if _, err := tx.Exec(t.Context(), stmt); err != nil {
			t.Fatal(err)
		}
	}
	var calls sync.WaitGroup
	defer calls.Wait()
	for range 2 {
		calls.Go(func() { w.call("GET", "/console/api/trace?id=a", "") })
		calls.Go(func() { w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf) })
	}
	soon := time.Now().Add(2 * time.Second)                                                  // they wait for 5 s
	gone := func(s console.State) bool { return s.Postgres.Error != "" && !s.Postgres.Slow } // slow is what a busy machine is
	if s := v.until(t, "an answer beside them", func(s console.State) bool { return gone(s) || s.Postgres.AsOf.After(soon) }); gone(s) {
		t.Errorf("postgres: %+v", s.Postgres)
	}
	_ = tx.Rollback(t.Context())
}

func TestWithoutPostgresTheRestIsShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *console.Options) {
		config, err := sql.PoolConfig("postgres://127.0.0.1:1/none?connect_timeout=1", "public", "console")
		if err != nil {
			t.Fatal(err)
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		o.Pool = pool
	})
	v := w.view()
	s := v.until(t, "Postgres is gone", func(s console.State) bool { return s.Postgres.Error != "" && s.Redis.AsOf != nil })
	if s.Verdict.Level != "bad" || s.Verdict.Title != "Postgres does not answer" || s.Redis.Error != "" {
		t.Errorf("verdict: %+v", s.Verdict)
	}
	// Postgres knows the streams' names: that there are no groups is not known.
	if s.Groups.AsOf != nil || s.Streams.AsOf != nil {
		t.Errorf("groups %+v, streams %+v", s.Groups, s.Streams)
	}
	if status, body := w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf); status != 503 {
		t.Errorf("mode: %d %s", status, body)
	}
}

// Nobody looks: Postgres and Redis are not asked.
func TestNobodyIsAskedWhileNobodyLooks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	v := w.view()
	v.until(t, "asked", func(s console.State) bool { return s.Redis.AsOf != nil && s.Postgres.AsOf != nil })
	v.resp.Body.Close()
	calls := func() int64 {
		info, err := w.redis.Client.InfoMap(t.Context(), "commandstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		var n int64
		if _, err := fmt.Sscanf(info["Commandstats"]["cmdstat_xadd"], "calls=%d", &n); err != nil {
			t.Fatalf("%v: %v", info, err)
		}
		return n // the probe for whether Redis can be written
	}
	// The server notices that the viewer has left at the next message.
	var last int64
	testenv.Eventually(t, 20*time.Second, func() error {
		before := calls()
		same := last == before
		last = before
		if !same {
			return errors.New("still asked")
		}
		<-time.After(2500 * time.Millisecond)
		if n := calls(); n != before {
			return fmt.Errorf("%d calls, then %d", before, n)
		}
		return nil
	})
}

func TestDeadEventsOfBothKindsAndTheirActions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	id := uuid.New()
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, error, class, attempts)
		VALUES ($1, 1, 'order', 'a', 'order.created', '{"card":"4111"}', now(), 'refused', 'wrongtype', 3)`, id)
	var list struct {
		Dead  []admin.Dead
		Total int
	}
	if status := w.get("/console/api/dead?fresh=1", &list); status != 200 || list.Total != 1 || list.Dead[0].ID != id {
		t.Fatalf("dead: %d %+v", status, list)
	}
	if _, body := w.call("GET", "/console/api/dead?fresh=1", ""); strings.Contains(body, "4111") {
		t.Errorf("the list has the payload: %s", body)
	}
	var s console.State
	w.get("/console/api/state", &s)
	if s.Dead.Value.Relay != 1 {
		t.Errorf("counted: %+v", s.Dead)
	}
	status, body := w.call("POST", "/console/api/dead/retry", `{"ids":["`+id.String()+`"]}`, "X-Posthaste-Csrf", w.csrf)
	if status != 200 || !strings.Contains(body, id.String()) || strings.Contains(body, "error") {
		t.Errorf("retry: %d %s", status, body)
	}
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox WHERE id = $1", id); n != 1 {
		t.Errorf("%d rows in the outbox", n)
	}
	other := uuid.NewString()
	if status, body := w.call("POST", "/console/api/dead/drop", `{"ids":["`+other+`"]}`, "X-Posthaste-Csrf", w.csrf); status != 200 || !strings.Contains(body, "no parked event") {
		t.Errorf("drop of nothing: %d %s", status, body)
	}
	for _, body := range []string{`{"ids":[]}`, `{}`} {
		if status, _ := w.call("POST", "/console/api/dead/drop", body, "X-Posthaste-Csrf", w.csrf); status != 422 {
			t.Errorf("%s: %d", body, status)
		}
	}
}

// The role that docs/operations.md gives to serve may read and insert, and no more: its console must not call that a fault.
func TestTheRoleOfServeSeesWhatItMay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *console.Options) {
		db, err := pgx.Connect(t.Context(), o.Doctor.PostgresURL)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close(context.Background()) })
		role := pgx.Identifier{"api_" + o.RelayName}.Sanitize()
		for _, stmt := range []string{"CREATE ROLE " + role + " LOGIN", "GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO " + role} {
			if _, err := db.Exec(t.Context(), stmt); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			for _, stmt := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
				if _, err := db.Exec(context.Background(), stmt); err != nil {
					t.Error(err)
				}
			}
		})
		o.Doctor.WriterOnly = true
		o.Doctor.PostgresURL = strings.Replace(o.Doctor.PostgresURL, "postgres://postgres@", "postgres://api_"+o.RelayName+"@", 1)
		config, err := sql.PoolConfig(o.Doctor.PostgresURL, "public", "console")
		if err != nil {
			t.Fatal(err)
		}
		if o.Pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(o.Pool.Close)
		o.Slots, err = cdc.NewSlots(cdc.SlotsOptions{Pool: o.Pool, Slot: o.Doctor.Slot})
		if err != nil {
			t.Fatal(err)
		}
	})
	w.db.Exec(t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'order', 'a', 'order.created', '{}')")
	v := w.view()
	s := v.until(t, "an answer", func(s console.State) bool { return s.Postgres.Value.Written > 0 || s.Postgres.Error != "" })
	if s.Postgres.Error != "" || s.Postgres.Value.Backlog.Rows != 1 {
		t.Errorf("postgres: %+v", s.Postgres)
	}
	var d admin.Diagnosis
	if w.get("/console/api/doctor", &d); !d.OK {
		t.Errorf("the doctor complains of rights that only the relay needs: %+v", d)
	}
	if status, body := w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf); status != 503 || !strings.Contains(body, "permission denied") {
		t.Errorf("mode: %d %s", status, body)
	}
}

// After a flush everything flows again at once; what is gone stays gone, and the page must not say that nothing is lost.
func TestAFlushedRedisIsALoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream VALUES ('outbox.order', 0)")
	if err := w.redis.Client.Do(t.Context(), "XADD", "outbox.order", "*", "id", uuid.NewString()).Err(); err != nil {
		t.Fatal(err)
	}
	v := w.view()
	v.until(t, "the stream is seen", func(s console.State) bool {
		return s.Lost == nil && len(s.Streams.Value) == 1 && s.Streams.Value[0].Length == 1
	})
	if err := w.redis.Client.FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	v.until(t, "the loss is seen", func(s console.State) bool {
		all := append([]console.Problem{{Title: s.Verdict.Title}}, s.Verdict.Also...)
		return s.Lost != nil && slices.ContainsFunc(all, func(p console.Problem) bool { return p.Title == "Redis has lost data" })
	})
}

// Payloads of 8 MiB may have died by the thousand: to see that must not cost their size, neither here nor in Redis.
func TestDeadEventsOfGroupsAreReadWithoutTheirPayloads(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream VALUES ('outbox.order', 0)")
	const n = 230
	_, err := w.redis.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for range n {
			p.Do(t.Context(), "XADD", "dead.outbox.order", "*", "id", uuid.NewString(), "type", "order.created", "subject", "o-1", "data", strings.Repeat("x", 64<<10),
				"dead_stream", "outbox.order", "dead_entry", "1-1", "dead_group", "mail", "dead_error", "boom", "dead_attempts", "3", "dead_at", "2026-01-01T00:00:00.000000Z")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sent := func() int {
		info, err := w.redis.Client.InfoMap(t.Context(), "stats").Result()
		if err != nil {
			t.Fatal(err)
		}
		b, _ := strconv.Atoi(info["Stats"]["total_net_output_bytes"])
		return b
	}
	before := sent()
	var list struct {
		Dead  []admin.Dead
		Total int
	}
	if status := w.get("/console/api/dead?fresh=1", &list); status != 200 || list.Total != n || len(list.Dead) != 200 {
		t.Fatalf("dead: %d, %d of %d", status, len(list.Dead), list.Total)
	}
	if d := list.Dead[0]; d.Source != "mail" || d.AggregateType != "order" || d.AggregateID != "o-1" || d.Error != "boom" || d.Attempts != 3 {
		t.Errorf("%+v", d)
	}
	if b := sent() - before; b > 1<<20 {
		t.Errorf("Redis sent %d bytes", b)
	}
	var s console.State
	if w.get("/console/api/state", &s); s.Dead.Value.Groups != n || s.Dead.Value.First != "boom" {
		t.Errorf("counted: %+v", s.Dead)
	}
	status, body := w.call("POST", "/console/api/dead/drop", `{"ids":["`+list.Dead[0].ID.String()+`"]}`, "X-Posthaste-Csrf", w.csrf)
	if left := w.redis.Client.XLen(t.Context(), "dead.outbox.order").Val(); status != 200 || strings.Contains(body, "error") || left != n-1 {
		t.Errorf("drop: %d %s, %d left", status, body, left)
	}
}

// The answers are for the console's own page. One of another origin cannot read them, and must not take the viewers' places.
func TestOtherOriginsGetNoStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for _, h := range [][]string{{"Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Site", "same-site"}, {"Origin", "http://evil.example"}} {
		for _, path := range []string{"session", "doctor", "trace?id=1", "stream"} { // the stream last: it would not end
			if status, _ := w.call("GET", "/console/api/"+path, "", h...); status != 403 {
				t.Fatalf("%s with %v: %d, want 403", path, h, status)
			}
		}
		if status, _ := w.call("GET", "/console/", "", h...); status != 200 { // a link from elsewhere
			t.Errorf("the page with %v: %d", h, status)
		}
	}
	for _, h := range [][]string{{"Sec-Fetch-Site", "same-origin"}, {"Sec-Fetch-Site", "none"}, {"Origin", w.url}} {
		if status, _ := w.call("GET", "/console/api/session", "", h...); status != 200 {
			t.Errorf("session with %v: %d", h, status)
		}
	}
}

func TestTraceAnswersForWhatIsKnown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'order', 'a b/c', 'order.created', '{}')`)
	if status, body := w.call("GET", "/console/api/trace?id=a%20b/c", ""); status != 200 || !strings.Contains(body, "waits to be published") {
		t.Errorf("%d %s", status, body)
	}
	for query, want := range map[string]int{"id=nothing": 404, "": 422, "id=" + strings.Repeat("x", 1025): 422, "id=k&user=nobody": 422, "id=k&user=" + uuid.NewString(): 404} {
		if status, body := w.call("GET", "/console/api/trace?"+query, ""); status != want {
			t.Errorf("%.40s: %d %s, want %d", query, status, body, want)
		}
	}
}
