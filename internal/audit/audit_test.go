package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

var must = testenv.Must

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

var bob = Who{Actor: "bob@host", Source: "terminal"}

func newTrail(t *testing.T) (*Trail, *testenv.Database, *bytes.Buffer) {
	t.Helper()
	db, out := testenv.Postgres(t), &bytes.Buffer{}
	return New(db.Pool, slog.New(slog.NewJSONHandler(out, nil))), db, out
}

func nothing(context.Context) (Detail, error) { return nil, nil }

func list(t *testing.T, db *testenv.Database) []Entry {
	t.Helper()
	l, err := List(t.Context(), db.Pool, time.Time{}, 1000)
	must(t, err)
	return l
}

// A change has an entry before it, one with its outcome after it, and one line in the log. Neither contains the texts
// of errors, which may hold anything.
func TestAChangeLeavesItsOutcome(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err             error
		outcome, reason string
	}{
		{nil, ok, ""},
		{fmt.Errorf("retry: %w", sql.ErrNotParked), refused, "not dead"},
		{sql.ErrUnreadable, refused, "unreadable"},
		{context.DeadlineExceeded, failed, "timeout"},
		{context.Canceled, failed, "interrupted"},
		{errors.New("the payload is 4111111111111111"), failed, "error"},
		{redisError("NOPERM this user 4111111111111111"), failed, "redis NOPERM"},
		{redisError("Unexpected 4111111111111111"), failed, "redis"},
		{errPartly, failed, "partly"},
	} {
		trail, db, out := newTrail(t)
		err := trail.Do(t.Context(), bob, Mode, Detail{"mode": "poll"}, func(context.Context) (Detail, error) {
			if n := testenv.Value[int](t, db, "SELECT count(*) FROM posthaste_audit WHERE outcome = 'begun'"); n != 1 {
				t.Errorf("%d entries before the change", n)
			}
			if l := list(t, db); len(l) != 1 || l[0].Outcome != begun {
				t.Errorf("a change under way is listed as %+v", l)
			}
			return Detail{"done": 3}, c.err
		})
		if !errors.Is(err, c.err) {
			t.Errorf("returned %v, want %v", err, c.err)
		}
		l := list(t, db)
		var detail map[string]any
		if len(l) != 1 || json.Unmarshal(l[0].Detail, &detail) != nil {
			t.Fatalf("%v: %+v", c.err, l)
		}
		if e := l[0]; e.Outcome != c.outcome || e.Reason != c.reason || e.Action != Mode || e.Actor != bob.Actor ||
			e.Source != "terminal" || detail["mode"] != "poll" || detail["done"] != 3.0 || e.Role != "postgres" ||
			time.Since(e.At).Abs() > time.Minute {
			t.Errorf("%v: %+v %s", c.err, e, e.Detail)
		}
		const both = "SELECT count(DISTINCT attempt) * 10 + count(*) FROM posthaste_audit"
		if n := testenv.Value[int](t, db, both); n != 12 {
			t.Errorf("%v: %d, want one attempt with two entries", c.err, n)
		}
		line := out.String()
		if strings.Count(line, "\n") != 1 || !strings.Contains(line, `"outcome":"`+c.outcome+`"`) ||
			!strings.Contains(line, bob.Actor) || strings.Contains(line, "4111111111111111") ||
			strings.Contains(string(l[0].Detail), "4111111111111111") {
			t.Errorf("%v: logged %s", c.err, line)
		}
	}
}

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

// Without its entry the change is not made. With it, the change stays, whether or not the outcome can be written.
func TestWithoutAnEntryNothingIsChanged(t *testing.T) {
	t.Parallel()
	trail, db, out := newTrail(t)
	ended, end := context.WithCancel(t.Context())
	end()
	err := trail.Do(ended, bob, Mode, nil, func(context.Context) (Detail, error) {
		t.Error("changed for somebody who has gone before")
		return nil, nil
	})
	if !errors.Is(err, ErrNoEntry) || !strings.Contains(out.String(), "no entry") {
		t.Errorf("%v; logged %s", err, out)
	}
	leaving, leave := context.WithCancel(t.Context())
	if err := trail.Do(leaving, bob, Mode, nil, func(context.Context) (Detail, error) {
		leave()
		return nil, nil
	}); err != nil {
		t.Error(err)
	}
	if l := list(t, db); len(l) != 1 || l[0].Outcome != ok {
		t.Errorf("of somebody who left meanwhile: %+v", l)
	}
	out.Reset()
	if err := trail.Do(t.Context(), bob, Uninstall, nil, func(ctx context.Context) (Detail, error) {
		_, err := db.Pool.Exec(ctx, "DROP TABLE posthaste_audit")
		return nil, err
	}); err != nil || !strings.Contains(out.String(), `"outcome":"ok"`) ||
		!strings.Contains(out.String(), "is not in posthaste_audit") {
		t.Errorf("%v; logged %s", err, out)
	}
	if err := trail.Do(t.Context(), bob, Mode, nil, func(context.Context) (Detail, error) {
		t.Error("changed without a table")
		return nil, nil
	}); sql.SQLState(err) != pgerrcode.UndefinedTable {
		t.Error(err)
	}
}

// Refused clients cannot fill the table: a burst is written, then one a minute; the rest are counted.
func TestRefusalsAreBounded(t *testing.T) {
	t.Parallel()
	trail, db, out := newTrail(t)
	now := time.Now()
	trail.now = func() time.Time { return now }
	const many = 500
	for range many {
		trail.Refuse(t.Context(), Who{Actor: "wrong token", Source: "192.0.2.1:1"}, Mode, "wrong token", nil)
	}
	if l := list(t, db); len(l) != refusedBurst || l[0].Outcome != refused || l[0].Reason != "wrong token" {
		t.Errorf("%d entries, want %d", len(l), refusedBurst)
	}
	if n := strings.Count(out.String(), "\n"); n != refusedBurst {
		t.Errorf("%d lines in the log", n)
	}
	now = now.Add(refusedEvery)
	for range many {
		trail.Refuse(t.Context(), bob, Mode, "wrong token", Detail{"ids": []string{"a"}})
	}
	l := list(t, db)
	unwritten := fmt.Sprintf(`"unwritten": %d`, many-refusedBurst)
	if len(l) != refusedBurst+1 || !strings.Contains(string(l[0].Detail), unwritten) {
		t.Errorf("a minute later there are %d, the last %s", len(l), l[0].Detail)
	}
	// Changes that are made are always written.
	if err := trail.Do(t.Context(), bob, Mode, nil, nothing); err != nil {
		t.Error(err)
	}
	if l := list(t, db); l[0].Outcome != ok {
		t.Errorf("%+v", l[0])
	}
}

// No role can change or delete a row, not even the owner by mistake. An attempt has one outcome.
func TestTheTableOnlyGrows(t *testing.T) {
	t.Parallel()
	trail, db, _ := newTrail(t)
	must(t, trail.Do(t.Context(), bob, Mode, nil, nothing))
	for _, stmt := range []string{
		"UPDATE posthaste_audit SET outcome = 'ok'", "DELETE FROM posthaste_audit", "TRUNCATE posthaste_audit",
		"DELETE FROM posthaste_audit WHERE false",
	} {
		if _, err := db.Pool.Exec(t.Context(), stmt); sql.SQLState(err) != pgerrcode.FeatureNotSupported {
			t.Errorf("%s: %v", stmt, err)
		}
	}
	_, err := db.Pool.Exec(t.Context(), "INSERT INTO posthaste_audit (attempt, outcome, action, actor, source) "+
		"SELECT attempt, 'failed', action, actor, source FROM posthaste_audit WHERE outcome = 'ok'")
	if sql.SQLState(err) != pgerrcode.UniqueViolation {
		t.Errorf("a second outcome: %v", err)
	}
}

// Entries stay small whatever the arguments are, and Postgres accepts them.
func TestEntriesAreSmall(t *testing.T) {
	t.Parallel()
	trail, db, out := newTrail(t)
	var ids []string
	for range 5000 {
		ids = append(ids, uuid.NewString()+strings.Repeat("x", 300))
	}
	long := strings.Repeat("y", 1<<20) + "\x00\xff"
	for _, args := range []Detail{
		{"ids": ids, "stream": long}, {"stream": "a\x00b\xffc"}, {"other": map[string]string{"a": long}},
	} {
		must(t, trail.Do(t.Context(), Who{long, "a\x00b"}, Mode, args, func(context.Context) (Detail, error) {
			return args, nil
		}))
	}
	for _, e := range list(t, db) {
		if len(e.Detail) > maxDetail || len(e.Actor) > 2*maxText {
			t.Errorf("an entry of %d bytes", len(e.Detail))
		}
	}
	if out.Len() > 5*maxDetail {
		t.Errorf("%d bytes in the log", out.Len())
	}
	// The usual case.
	ids = ids[:0]
	for range 1000 {
		ids = append(ids, uuid.NewString())
	}
	var tally Tally
	for _, id := range ids {
		tally.Add(id, nil)
	}
	became, err := tally.Result()
	must(t, err)
	must(t, trail.Do(t.Context(), bob, DeadRetry, Detail{"ids": ids}, func(context.Context) (Detail, error) {
		return became, nil
	}))
	var d struct {
		IDs  []string `json:"ids"`
		More int      `json:"ids_more"`
		Done int      `json:"done"`
	}
	if err := json.Unmarshal(list(t, db)[0].Detail, &d); err != nil || len(d.IDs) != maxList || d.More != 900 ||
		d.Done != 1000 {
		t.Errorf("%d ids and %d more, %d done, %v", len(d.IDs), d.More, d.Done, err)
	}
}

// A handler that is not called through Serve changes nothing.
func TestARequestThatIsNotKnownChangesNothing(t *testing.T) {
	t.Parallel()
	err := Do(t.Context(), nil, func(context.Context) (Detail, error) {
		t.Error("changed")
		return nil, nil
	})
	if !errors.Is(err, ErrNoEntry) {
		t.Error(err)
	}
	trail, db, out := newTrail(t)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/", nil)
	silent := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	trail.Serve(httptest.NewRecorder(), r, silent, bob, Mode, nil)
	if len(list(t, db)) != 0 || !strings.Contains(out.String(), "without an entry") {
		t.Errorf("a handler that notes nothing: %s", out)
	}
}

// A listing begins with the newest, and is bounded by time and number.
func TestList(t *testing.T) {
	t.Parallel()
	trail, db, _ := newTrail(t)
	for i := range 3 {
		must(t, trail.Do(t.Context(), bob, Mode, Detail{"n": i}, func(context.Context) (Detail, error) {
			return nil, nil
		}))
	}
	l, err := List(t.Context(), db.Pool, time.Time{}, 2)
	if err != nil || len(l) != 2 || string(l[0].Detail) != `{"n": 2}` || string(l[1].Detail) != `{"n": 1}` {
		t.Errorf("%v, %v", l, err)
	}
	if l, err = List(t.Context(), db.Pool, l[0].At, 10); err != nil || len(l) != 1 {
		t.Errorf("since the last: %v, %v", l, err)
	}
}
