package admin_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/api/admin"
	"posthaste/api/admin/console"
	"posthaste/internal/audit"
	"posthaste/internal/lab/testenv"
	"posthaste/sink"
)

// newAudited is a world with a console and tokens. It also returns the log.
func newAudited(t *testing.T) (*world, *bytes.Buffer) {
	t.Helper()
	client, err := sink.NewClient(testenv.Redis(t).URL())
	must(t, err)
	t.Cleanup(func() { _ = client.Close() })
	var log bytes.Buffer
	w := newWorld(t, "secret", func(o *admin.Options) {
		o.ReadToken, o.Logger = "look", slog.New(slog.NewJSONHandler(&log, nil))
		o.Console = console.New(console.Options{
			RelayName: o.RelayName, StreamPrefix: "outbox.", Pool: o.Pool, Redis: client, Slots: o.Slots,
			Metrics: prometheus.NewRegistry(),
		})
	})
	return w, &log
}

func (w *world) entries(t *testing.T) []audit.Entry {
	t.Helper()
	l, err := audit.List(t.Context(), w.db.Pool, time.Time{}, 1000)
	must(t, err)
	return l
}

// page returns the headers that the console's page sends with a change.
func (w *world) page(t *testing.T) []string {
	t.Helper()
	var session struct{ CSRF string }
	_, body := w.call(t, "GET", "/console/api/session", "", "Authorization", "Bearer secret")
	if err := json.Unmarshal([]byte(body), &session); err != nil || session.CSRF == "" {
		t.Fatalf("session: %s, %v", body, err)
	}
	return []string{"Authorization", "Bearer secret", "X-Posthaste-Csrf", session.CSRF}
}

// request makes a valid request for a call that changes something.
func (w *world) request(t *testing.T, pattern string) (method, path, body string) {
	t.Helper()
	id := uuid.New()
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at,
		error, class, attempts)
		VALUES ($1, 1, 'order', 'a', 'x', '{"card":"4111111111111111"}', now(), 'refused', 'wrongtype', 3)`, id)
	method, path, _ = strings.Cut(pattern, " ")
	switch {
	case strings.HasSuffix(path, "/mode"):
		body = `{"mode":"poll"}`
	case strings.HasPrefix(path, "/console/api/dead/"):
		body = `{"ids":["` + id.String() + `"]}`
	}
	return method, strings.ReplaceAll(path, "{id}", id.String()), body
}

// Every change leaves two audit entries, one before it and one with its outcome, and one log line. A call that is not
// listed is refused, so it changes nothing.
func TestEveryChangeLeavesAnEntry(t *testing.T) {
	t.Parallel()
	w, log := newAudited(t)
	page := w.page(t)
	for pattern, action := range admin.Changes {
		log.Reset()
		before := len(w.entries(t))
		method, path, body := w.request(t, pattern)
		if status, answer := w.call(t, method, path, body, page...); status/100 != 2 {
			t.Fatalf("%s: %d %s", pattern, status, answer)
		}
		l := w.entries(t)
		if len(l) != before+1 {
			t.Fatalf("%s left %d entries", pattern, len(l)-before)
		}
		e := l[0]
		var detail map[string]any
		if err := json.Unmarshal(e.Detail, &detail); err != nil || e.Outcome != "ok" || e.Action != action ||
			e.Actor != "admin token" || !strings.HasPrefix(e.Source, "127.0.0.1:") ||
			detail["mode"] == nil && detail["ids"] == nil {
			t.Errorf("%s left %+v %s", pattern, e, e.Detail)
		}
		n := testenv.Value[int](t, w.db, "SELECT count(*) FROM posthaste_audit WHERE attempt = $1", e.Attempt)
		testenv.Equal(t, pattern+": rows of one attempt", n, 2)
		if lines := log.String(); strings.Count(lines, `"component":"audit"`) != 1 ||
			strings.Count(lines, `"action":"`+action+`"`) != 1 {
			t.Errorf("%s: logged %s", pattern, lines)
		}
		for _, secret := range []string{"4111111111111111", "secret", page[3]} {
			if strings.Contains(log.String(), secret) || strings.Contains(fmt.Sprintf("%+v %s", e, e.Detail), secret) {
				t.Errorf("%s: the entry has %q", pattern, secret)
			}
		}
	}
	before := len(w.entries(t))
	for _, other := range []string{
		"POST /relay/mode", "PUT /relay", "DELETE /relay/dead", "PATCH /console/api/mode", "POST /debug/pprof/",
		"POST /console/api/new", "QUERY /relay/mode",
	} {
		method, path, body := w.request(t, other)
		w.expect(t, http.StatusMethodNotAllowed, method, path, body, page...)
	}
	testenv.Equal(t, "entries of what is not answered", len(w.entries(t)), before)
	if _, body := w.call(t, "GET", "/console/api/audit", "", page...); strings.Count(body, `"outcome":"ok"`) != before {
		t.Errorf("the console shows %s", body)
	}
}

// Refused changes are audited, whatever refuses them. Refused reads are not.
func TestRefusedChangesAreNoted(t *testing.T) {
	t.Parallel()
	for reason, headers := range map[string][]string{
		"no token":       {},
		"wrong token":    {"Authorization", "Bearer topsecret"},
		"read token":     {"Authorization", "Bearer look"},
		"foreign origin": {"Authorization", "Bearer secret", "Origin", "https://evil.example"},
	} {
		w, log := newAudited(t)
		for pattern, action := range admin.Changes {
			before := len(w.entries(t))
			method, path, body := w.request(t, pattern)
			if status, _ := w.call(t, method, path, body, headers...); status != 401 && status != 403 {
				t.Errorf("%s, %s: %d", pattern, reason, status)
			}
			l := w.entries(t)
			if len(l) != before+1 || l[0].Outcome != "refused" || l[0].Reason != reason || l[0].Action != action {
				t.Fatalf("%s, %s: %+v", pattern, reason, l)
			}
			_, rest, one := strings.Cut(path, "/relay/dead/")
			if id, _, _ := strings.Cut(rest, "/"); one && !strings.Contains(string(l[0].Detail), id) {
				t.Errorf("%s: the id is not in %s", pattern, l[0].Detail)
			}
			w.call(t, "GET", "/relay", "", headers...) // a read
		}
		lines := strings.Count(log.String(), `"outcome":"refused"`)
		testenv.Equal(t, reason+": lines in the log", lines, len(admin.Changes))
		if strings.Contains(log.String(), "secret") || strings.Contains(log.String(), "evil") {
			t.Errorf("%s: the log has what was sent: %s", reason, log)
		}
	}
	// The remaining reasons.
	w, _ := newAudited(t)
	page := w.page(t)
	for _, c := range []struct {
		method, path, body string
		outcome, reason    string
		headers            []string
	}{
		{"PUT", "/console/api/mode", `{"mode":"poll"}`, "refused", "no token of the page", page[:2]},
		{"PUT", "/relay/mode", `4111111111111111`, "refused", "bad request", page},
		{"PUT", "/relay/mode", `{"mode":"4111111111111111"}`, "refused", "unprocessable entity", page},
		{"DELETE", "/relay/dead/" + uuid.NewString(), "", "refused", "not dead", page},
		{"DELETE", "/relay/dead/4111111111111111", "", "refused", "bad request", page},
	} {
		w.call(t, c.method, c.path, c.body, c.headers...)
		if e := w.entries(t)[0]; e.Outcome != c.outcome || e.Reason != c.reason ||
			strings.Contains(fmt.Sprintf("%+v %s", e, e.Detail), "4111111111111111") {
			t.Errorf("%s %s %s: %+v %s", c.method, c.path, c.body, e, e.Detail)
		}
	}
}

// If its entry cannot be written, a change is not made.
func TestAChangeThatCannotBeNotedIsNotMade(t *testing.T) {
	t.Parallel()
	w, log := newAudited(t)
	page := w.page(t)
	w.db.Exec(t, "ALTER TABLE posthaste_audit RENAME TO elsewhere")
	for pattern := range admin.Changes {
		method, path, body := w.request(t, pattern)
		testenv.Contains(t, pattern, w.expect(t, 503, method, path, body, page...), "nothing was changed")
	}
	n := testenv.Value[int](t, w.db, "SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM relay_state "+
		"WHERE desired_mode = 'poll') + (SELECT count(*) FROM outbox_dead WHERE dropped_at IS NOT NULL)")
	testenv.Equal(t, "changes that were made", n, 0)
	testenv.Equal(t, "lines in the log", strings.Count(log.String(), `"reason":"no entry"`), len(admin.Changes))
}
