package console_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin/console"
	"posthaste/cdc"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sql"
)

func TestThePageBringsEverythingAndAllowsNothingElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	resp, err := http.Get(w.url + "/console/") //nolint:noctx // ends with the server
	must(t, err)
	defer resp.Body.Close()
	csp := resp.Header.Get("Content-Security-Policy")
	if !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") ||
		strings.Contains(csp, "http") || !strings.Contains(csp, "frame-ancestors 'none'") {
		t.Errorf("policy: %s", csp)
	}
	page, err := io.ReadAll(resp.Body)
	if err != nil || strings.Contains(string(page), "style=") || strings.Contains(string(page), "://") ||
		strings.Contains(string(page), "onclick=") {
		t.Errorf("the page has inline style or script, or loads from elsewhere: %v", err)
	}
	if status, body := w.call("GET", "/console/runbook", ""); status != 200 ||
		!strings.Contains(body, `id="outboxdeadevents"`) || !strings.Contains(body, "posthaste dead retry") ||
		strings.Contains(body, "## ") || strings.Contains(body, "**") || strings.Contains(body, "```") {
		t.Errorf("the runbook: %d", status)
	}
	for _, path := range []string{
		"console.js", "console.css", "pipeline.js", "chart.js", "util.js", "theme.js",
		"icon.svg",
	} {
		w.expect(200, "GET", "/console/"+path, "")
	}
	testenv.Contains(t, "the listener's root", w.expect(200, "GET", "/", ""), "<title>posthaste")
}

func TestChangesNeedTheTokenOfThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	id := uuid.NewString()
	for _, c := range []struct{ method, path, body string }{
		{"PUT", "/console/api/mode", `{"mode":"poll"}`},
		{"POST", "/console/api/dead/retry", `{"ids":["` + id + `"]}`},
		{"POST", "/console/api/dead/drop", `{"ids":["` + id + `"]}`},
	} {
		for _, token := range []string{"", "wrong", w.csrf + "x"} {
			w.expect(403, c.method, c.path, c.body, "X-Posthaste-Csrf", token)
		}
		w.expect(403, c.method, c.path, c.body, "X-Posthaste-Csrf", w.csrf, "Origin", "https://evil.example")
		w.expect(200, c.method, c.path, c.body, "X-Posthaste-Csrf", w.csrf)
	}
	if st, err := sql.ReadState(t.Context(), w.db.Pool, w.db.Relay); err != nil || st.Desired != outbox.ModePoll {
		t.Errorf("desired %v, %v", st.Desired, err)
	}
	for body, want := range map[string]int{`{"mode":"fast"}`: 422, `nonsense`: 400, `{"mode":"poll","x":1}`: 400} {
		w.expect(want, "PUT", "/console/api/mode", body, "X-Posthaste-Csrf", w.csrf)
	}
	// Calls from curl work as before.
	w.expect(200, "PUT", "/relay/mode", `{"mode":"auto"}`)
}

func TestEventsComeWithoutTheirPayload(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 0)")
	values := []any{
		"id", uuid.NewString(), "type", "order.created", "subject", "o-1", "time",
		"2026-01-01T00:00:00.000000Z", "data", `{"card":"4111111111111111"}`,
	}
	must(t, w.redis.Client.Do(t.Context(), append([]any{"XADD", "outbox.order", "*"}, values...)...).Err())
	s := w.until("the event", func(s console.State) bool { return len(s.Events) > 0 })
	if e := s.Events[0]; len(s.Events) != 1 || e.Subject != "o-1" || e.Stream != "outbox.order" {
		t.Errorf("events %+v", s.Events)
	}
	if _, body := w.call("GET", "/console/api/state", ""); strings.Contains(body, "4111111111111111") {
		t.Errorf("state: %s", body)
	}
	// Redis reads at most 1 MiB of large entries: the newest are shown.
	values[9] = strings.Repeat("x", 400<<10)
	_, err := w.redis.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		for range 10 {
			p.Do(t.Context(), append([]any{"XADD", "outbox.order", "*"}, values...)...)
		}
		return nil
	})
	must(t, err)
	s = w.until("the large ones", func(s console.State) bool { return len(s.Events) > 1 })
	testenv.Equal(t, "large events of ten that are shown", len(s.Events)-1, 3)
}

func TestDeadEventsOfBothKindsAndTheirActions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	id := uuid.New()
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, `+
		`error, class, attempts)
		VALUES ($1, 1, 'order', 'a', 'order.created', '{"card":"4111111111111111"}', now(), 'refused', 'wrongtype',
			3)`, id)
	var list struct {
		Dead  []ops.Dead
		Total int
	}
	if status := w.get("/console/api/dead?fresh=1", &list); status != 200 || list.Total != 1 || list.Dead[0].ID != id {
		t.Fatalf("dead: %d %+v", status, list)
	}
	if _, body := w.call("GET", "/console/api/dead?fresh=1", ""); strings.Contains(body, "4111111111111111") {
		t.Errorf("the list has the payload: %s", body)
	}
	var s console.State
	w.get("/console/api/state", &s)
	testenv.Equal(t, "counted", s.Dead.Value.Relay, 1)
	status, body := w.call("POST", "/console/api/dead/retry", `{"ids":["`+id.String()+`"]}`, "X-Posthaste-Csrf", w.csrf)
	if status != 200 || !strings.Contains(body, id.String()) || strings.Contains(body, "error") {
		t.Errorf("retry: %d %s", status, body)
	}
	n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox WHERE id = $1", id)
	testenv.Equal(t, "rows in the outbox", n, 1)
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, `+
		`error, class, attempts)
		SELECT gen_random_uuid(), i, 'order', 'a', 'order.created', '{}', now(), 'refused', 'wrongtype', 3
		FROM generate_series(2, 601) AS i`)
	w.get("/console/api/dead?fresh=1", &list)
	testenv.Equal(t, "dead events of 601 that are listed", len(list.Dead), 601)
	other := uuid.NewString()
	body = w.expect(200, "POST", "/console/api/dead/drop", `{"ids":["`+other+`"]}`, "X-Posthaste-Csrf", w.csrf)
	testenv.Contains(t, "to drop nothing", body, "no dead event")
	for _, body := range []string{`{"ids":[]}`, `{}`} {
		w.expect(422, "POST", "/console/api/dead/drop", body, "X-Posthaste-Csrf", w.csrf)
	}
}

// The role that docs/operations.md gives to serve may read and insert only. Its console must not report that as a
// fault.
func TestTheRoleOfServeSeesWhatItMay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *console.Options) {
		db, err := pgx.Connect(t.Context(), o.Doctor.PostgresURL)
		must(t, err)
		t.Cleanup(func() { _ = db.Close(context.Background()) })
		role := pgx.Identifier{"api_" + o.RelayName}.Sanitize()
		for _, stmt := range []string{
			"CREATE ROLE " + role + " " + testenv.Login(o.Doctor.PostgresURL),
			"GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO " + role,
		} {
			_, err := db.Exec(t.Context(), stmt)
			must(t, err)
		}
		t.Cleanup(func() {
			for _, stmt := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
				_, err := db.Exec(context.Background(), stmt)
				testenv.ErrorIs(t, stmt, err, nil)
			}
		})
		o.Doctor.WriterOnly = true
		o.Doctor.PostgresURL = testenv.As(o.Doctor.PostgresURL, "api_"+o.RelayName)
		config, err := sql.PoolConfig(o.Doctor.PostgresURL, "public", "console")
		must(t, err)
		o.Pool, err = pgxpool.NewWithConfig(t.Context(), config)
		must(t, err)
		t.Cleanup(o.Pool.Close)
		o.Slots, err = cdc.NewSlots(cdc.Options{Pool: o.Pool, Slot: o.Doctor.Slot})
		must(t, err)
	})
	w.db.Exec(t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES "+
		"(gen_random_uuid(), 'order', 'a', 'order.created', '{}')")
	s := w.until("an answer", func(s console.State) bool {
		return s.Postgres.Value.Written > 0 || s.Postgres.Error != ""
	})
	if s.Postgres.Error != "" || s.Postgres.Value.Backlog.Rows != 1 {
		t.Errorf("postgres: %+v", s.Postgres)
	}
	var d ops.Diagnosis
	if w.get("/console/api/doctor", &d); !d.OK {
		t.Errorf("the doctor complains of rights that only the relay needs: %+v", d)
	}
	body := w.expect(503, "PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf)
	testenv.Contains(t, "mode", body, "permission denied")
}

// After a flush, publishing continues at once, but the flushed events are lost. The page must report the loss.
func TestAFlushedRedisIsALoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 0)")
	must(t, w.redis.Client.Do(t.Context(), "XADD", "outbox.order", "*", "id", uuid.NewString()).Err())
	w.until("the stream is seen", func(s console.State) bool {
		return s.Lost == nil && len(s.Streams.Value) == 1 && s.Streams.Value[0].Length == 1
	})
	must(t, w.redis.Client.FlushAll(t.Context()).Err())
	w.until("the loss is seen", func(s console.State) bool {
		all := append([]ops.PageProblem{{Title: s.Verdict.Title}}, s.Verdict.Also...)
		return s.Lost != nil &&
			slices.ContainsFunc(all, func(p ops.PageProblem) bool { return p.Title == "Redis has lost data" })
	})
}

func TestTraceAnswersForWhatIsKnown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES `+
		`(gen_random_uuid(), 'order', 'a b/c', 'order.created', '{}')`)
	testenv.Contains(t, "the trace", w.expect(200, "GET", "/console/api/trace?id=a%20b/c", ""), "not published yet")
	for query, want := range map[string]int{
		"id=nothing": 404, "": 422, "id=" + strings.Repeat("x", 1025): 422,
		"id=k&user=nobody": 422, "id=k&user=" + uuid.NewString(): 404,
	} {
		w.expect(want, "GET", "/console/api/trace?"+query, "")
	}
}

// A type with several streams is one group, as bad as its worst stream, in the table and in the verdict. Its dead
// events belong to that type.
func TestATypeWithSeveralStreamsIsOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, `INSERT INTO outbox_stream (stream, adopted_epoch, base) VALUES ('outbox.order', 0, 'outbox.order'),
		('outbox.order.0', 0, 'outbox.order'), ('outbox.order.1', 0, 'outbox.order'),
		('outbox.order.3', 0, 'outbox.order.3')`)
	ctx, client := t.Context(), w.redis.Client
	do := func(args ...any) {
		t.Helper()
		must(t, client.Do(ctx, args...).Err())
	}
	for _, stream := range []string{"outbox.order", "outbox.order.0", "outbox.order.1", "outbox.order.3"} {
		do("XADD", stream, "1-1", "id", "x") // old
		do("XGROUP", "CREATE", stream, "mailer", "$", "ENTRIESREAD", "1")
	}
	do("XGROUP", "SETID", "outbox.order.1", "mailer", "0", "ENTRIESREAD", "0")
	do("XADD", "dead.outbox.order.1", "*", "id", uuid.NewString(), "dead_stream", "outbox.order.1", "dead_entry", "1-1",
		"dead_group", "mailer", "dead_attempts", "1")
	var s console.State
	testenv.Equal(t, "state: status", w.get("/console/api/state", &s), 200)
	if s.GroupSum.Groups != 2 || s.GroupSum.Unread != 1 {
		t.Errorf("sum %+v, want 1 unread of 2 groups", s.GroupSum)
	}
	var said []string
	for _, p := range s.Verdict.Also {
		if strings.Contains(p.Title, "mailer") {
			said = append(said, p.Title+": "+p.Remedy)
		}
	}
	if len(said) != 1 || !strings.HasPrefix(said[0], "No consumer reads for group mailer on outbox.order: ") ||
		!strings.HasSuffix(said[0], "posthaste groups drop --stream=outbox.order --group=mailer") {
		t.Errorf("verdict %q", said)
	}
	if on := s.Streams.Value; len(on) != 4 || on[2].Name != "outbox.order.1" || on[2].Base != "outbox.order" ||
		on[2].Length != 1 || on[2].Memory < 1 {
		t.Errorf("streams %+v", on)
	}
	var table struct {
		Groups struct {
			Value []struct {
				Stream    string
				Abandoned bool
				Streams   []struct {
					Stream    string
					Abandoned bool
				}
			}
		}
	}
	w.get("/console/api/state", &table)
	if g := table.Groups.Value; len(g) != 2 || g[0].Stream != "outbox.order" || !g[0].Abandoned ||
		len(g[0].Streams) != 3 || g[0].Streams[0].Stream != "outbox.order.1" || g[0].Streams[1].Abandoned ||
		g[1].Stream != "outbox.order.3" || g[1].Streams != nil {
		t.Errorf("groups %+v", g)
	}
	testenv.Contains(t, "dead", w.expect(200, "GET", "/console/api/dead?fresh=1", ""), `"aggregate_type":"order"`)
}
