package console_test

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api/admin/console"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/sql"
)

// The page shows a server that accepts connections and does not answer. The other sources continue.
func TestAHungServerShowsAndHoldsUpNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.until("all well", func(s console.State) bool { return s.Redis.AsOf != nil && s.Postgres.AsOf != nil })
	must(t, w.redis.Signal(syscall.SIGSTOP))
	t.Cleanup(func() { _ = w.redis.Signal(syscall.SIGCONT) })
	began := time.Now()
	s := w.until("Redis hangs", func(s console.State) bool { return s.Redis.Error != "" })
	if s.Verdict.Level != "bad" || s.Verdict.Parts["redis"] != "bad" || s.Postgres.Error != "" ||
		s.Redis.Since == nil || s.Redis.AsOf == nil {
		t.Errorf("state: %+v", s)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("noticed after %v", took)
	}
	// Postgres is still queried.
	asOf := *s.Postgres.AsOf
	w.until("Postgres is asked", func(s console.State) bool { return s.Postgres.AsOf.After(asOf) })
	// Calls that need no Redis work, and calls that need it return errors.
	testenv.Equal(t, "state: status", w.get("/console/api/state", &console.State{}), 200)
	var d ops.Diagnosis
	if status := w.get("/console/api/doctor", &d); status != 200 || d.OK {
		t.Errorf("doctor: %d %+v", status, d)
	}
	must(t, w.redis.Signal(syscall.SIGCONT))
	w.until("Redis is back", func(s console.State) bool { return s.Redis.Error == "" })
}

// Counting a large backlog takes longer than a page waits, and the table may be locked. Postgres is still up: reporting
// that no order can be placed would mislead the operator.
func TestAPostgresThatIsSlowIsNotGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	tx, err := w.db.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
	must(t, err)
	// On a busy machine even the ping of one read may fail; a later one succeeds.
	s := w.until("a slow Postgres", func(s console.State) bool { return s.Postgres.Slow })
	if s.Verdict.Title != "Postgres is too slow to answer" || s.Postgres.Error == "" || s.Verdict.Level != "bad" {
		t.Errorf("verdict: %+v", s.Verdict)
	}
	must(t, tx.Rollback(t.Context()))
	w.until("an answer", func(s console.State) bool { return s.Postgres.Error == "" && s.Postgres.AsOf != nil })
}

// Traces and actions that wait for a lock must not make Postgres appear unresponsive.
func TestWhatWaitsDoesNotStarveTheRest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.until("an answer", func(s console.State) bool { return s.Postgres.AsOf != nil })
	tx, err := w.db.Pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	for _, stmt := range []string{
		"LOCK TABLE orders IN ACCESS EXCLUSIVE MODE",
		"SELECT FROM relay_state FOR UPDATE",
	} {
		_, err = tx.Exec(t.Context(), stmt)
		must(t, err)
	}
	var calls sync.WaitGroup
	defer calls.Wait()
	for range 2 {
		calls.Go(func() { w.call("GET", "/console/api/trace?id="+uuid.NewString(), "") })
		calls.Go(func() { w.call("PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf) })
	}
	soon := time.Now().Add(2 * time.Second) // they wait for 5 s
	// a busy machine causes Slow
	gone := func(s console.State) bool { return s.Postgres.Error != "" && !s.Postgres.Slow }
	s := w.until("an answer beside them", func(s console.State) bool { return gone(s) || s.Postgres.AsOf.After(soon) })
	testenv.Equal(t, "Postgres is gone", gone(s), false)
	_ = tx.Rollback(t.Context())
}

func TestWithoutPostgresTheRestIsShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(o *console.Options) {
		config, err := sql.PoolConfig("postgres://127.0.0.1:1/none?connect_timeout=1", "public", "console")
		must(t, err)
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		must(t, err)
		t.Cleanup(pool.Close)
		o.Pool = pool
	})
	s := w.until("Postgres is gone", func(s console.State) bool {
		return s.Postgres.Error != "" && s.Redis.AsOf != nil
	})
	if s.Verdict.Level != "bad" || s.Verdict.Title != "Postgres does not answer" || s.Redis.Error != "" {
		t.Errorf("verdict: %+v", s.Verdict)
	}
	// Postgres has the streams' names. Whether there are groups is unknown.
	if s.Groups.AsOf != nil || s.Streams.AsOf != nil {
		t.Errorf("groups %+v, streams %+v", s.Groups, s.Streams)
	}
	w.expect(503, "PUT", "/console/api/mode", `{"mode":"poll"}`, "X-Posthaste-Csrf", w.csrf)
}

// There may be thousands of dead payloads of 8 MiB. Counting them must not transfer or copy them, here or in Redis.
func TestDeadEventsOfGroupsAreReadWithoutTheirPayloads(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 0)")
	const n = 230
	_, err := w.redis.Client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
		for range n {
			p.Do(t.Context(), "XADD", "dead.outbox.order", "*", "id", uuid.NewString(), "type", "order.created",
				"subject", "o-1", "data", strings.Repeat("x", 64<<10),
				"dead_stream", "outbox.order", "dead_entry", "1-1", "dead_group", "mail", "dead_error", "boom",
				"dead_attempts", "3", "dead_at", "2026-01-01T00:00:00.000000Z")
		}
		return nil
	})
	must(t, err)
	sent := func() int {
		info, err := w.redis.Client.InfoMap(t.Context(), "stats").Result()
		must(t, err)
		b, _ := strconv.Atoi(info["Stats"]["total_net_output_bytes"])
		return b
	}
	before := sent()
	var list struct {
		Dead  []ops.Dead
		Total int
	}
	if status := w.get("/console/api/dead?fresh=1", &list); status != 200 || list.Total != n || len(list.Dead) != n {
		t.Fatalf("dead: %d, %d of %d", status, len(list.Dead), list.Total)
	}
	if d := list.Dead[0]; d.Source != "mail" || d.AggregateType != "order" || d.AggregateID != "o-1" ||
		d.Error != "boom" || d.Attempts != 3 {
		t.Errorf("%+v", d)
	}
	if b := sent() - before; b > 1<<20 {
		t.Errorf("Redis sent %d bytes", b)
	}
	var s console.State
	if w.get("/console/api/state", &s); s.Dead.Value.Groups != n || s.Dead.Value.First != "boom" {
		t.Errorf("counted: %+v", s.Dead)
	}
	status, body := w.call("POST", "/console/api/dead/drop", `{"ids":["`+list.Dead[0].ID.String()+`"]}`,
		"X-Posthaste-Csrf", w.csrf)
	if left := w.redis.Client.XLen(t.Context(), "dead.outbox.order").Val(); status != 200 ||
		strings.Contains(body, "error") || left != n-1 {
		t.Errorf("drop: %d %s, %d left", status, body, left)
	}
}
