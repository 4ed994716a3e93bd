package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/internal/testenv"
)

// The program publishes to NATS, and needs no Redis. Each event is in the stream once and in order, through changes of
// the mode, relays and servers that are killed, and a deleted stream.
func TestRelay(t *testing.T) {
	t.Parallel()
	exe := testenv.Program(t, "")
	db, s := testenv.Postgres(t), startServer(t, 1)
	s.start()
	args := []string{
		"--postgres-url=" + db.URL, "--relay-name=" + db.Relay, "--sink-url=" + s.url(),
		"--redis-url=redis://127.0.0.1:1", // nobody listens there
	}
	relay := func() *exec.Cmd {
		c := exec.CommandContext(t.Context(), exe, append([]string{"relay", "--admin-addr=127.0.0.1:0"}, args...)...)
		testenv.Must(t, c.Start())
		t.Cleanup(func() {
			_ = c.Process.Kill()
			_ = c.Wait()
		})
		return c
	}
	run := func(command ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, exe, append(command, args...)...).CombinedOutput()
		return string(out), err
	}

	load := testenv.StartLoad(t, db, testenv.LoadOptions{Rate: 300, Tag: "a b."})
	emptied := func() {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			n := testenv.Value[int](t, db, "SELECT count(*) FROM outbox_backlog")
			return testenv.FailIf(n > 500, "%d events wait", n)
		})
	}
	first := relay()
	for _, mode := range []string{"cdc", "poll", "cdc", "poll"} {
		db.Exec(t, "UPDATE relay_state SET desired_mode = $1", mode)
		testenv.Eventually(t, time.Minute, func() error {
			active := testenv.Value[string](t, db, "SELECT coalesce((SELECT active_mode FROM relay_state), '')")
			return testenv.FailIf(active != mode, "the mode is %q, want %s", active, mode)
		})
		emptied()
	}
	testenv.Must(t, first.Process.Kill())
	second := relay()
	emptied()
	s.restart()
	emptied()
	db.Exec(t, "UPDATE relay_state SET desired_mode = 'auto'")
	testenv.Must(t, second.Process.Kill())
	relay()
	emptied()
	testenv.Must(t, s.js().DeleteStream("OUTBOX_ORDER"))
	emptied()
	load.Stop()
	testenv.Eventually(t, time.Minute, func() error {
		n := testenv.Value[int](t, db, "SELECT count(*) FROM outbox_backlog")
		if n > 0 {
			return fmt.Errorf("%d events wait", n)
		}
		return s.holds(t, db, all)
	})
	if out, err := run("status", "--check"); err != nil {
		t.Errorf("status: %v: %s", err, out)
	}
	if out, err := run("doctor"); err != nil || !strings.Contains(out, "nats") {
		t.Errorf("doctor: %v: %s", err, out)
	}
	for _, command := range [][]string{{"streams", "list"}, {"groups", "list"}} {
		if out, err := run(command...); err == nil || !strings.Contains(out, "--sink-url is set") {
			t.Errorf("%v: %v: %s", command, err, out)
		}
	}
}

func (s *server) js() nats.JetStreamContext {
	js, err := s.client().JetStream()
	testenv.Must(s.tb, err)
	return js
}

// extent is which of the table's events a stream must have.
type extent int

const (
	all    extent = iota
	ends          // the stream is trimmed
	begins        // a relay publishes
)

// holds compares the stream with the table: the same events, once each, in the table's order for each aggregate.
func (s *server) holds(t *testing.T, db *testenv.Database, which extent) error {
	t.Helper()
	want, got := map[string][]string{}, map[string][]string{}
	sub, err := s.js().SubscribeSync("outbox.order.>", nats.OrderedConsumer())
	testenv.Must(t, err)
	for {
		m, err := sub.NextMsg(time.Second)
		if errors.Is(err, nats.ErrTimeout) {
			break
		}
		testenv.Must(t, err)
		subject, err := url.PathUnescape(m.Header.Get("ce-subject"))
		testenv.Must(t, err)
		got[subject] = append(got[subject], m.Header.Get("ce-id"))
		if meta, err := m.Metadata(); which == begins && err == nil && meta.NumPending == 0 {
			break
		}
	}
	testenv.Must(t, sub.Unsubscribe())
	rows, err := db.Pool.Query(t.Context(),
		"SELECT id, aggregate_id FROM outbox WHERE aggregate_type = 'order' ORDER BY seq")
	testenv.Must(t, err)
	for rows.Next() {
		var id uuid.UUID
		var aggregate string
		testenv.Must(t, rows.Scan(&id, &aggregate))
		want[aggregate] = append(want[aggregate], id.String())
	}
	testenv.Must(t, rows.Err())
	for aggregate, ids := range want {
		switch n := min(len(got[aggregate]), len(ids)); which {
		case ends:
			ids = ids[len(ids)-n:]
		case begins:
			ids = ids[:n]
		}
		if !slices.Equal(ids, got[aggregate]) {
			return fmt.Errorf("aggregate %q has %d events in the stream, %d in the table, or another order", aggregate,
				len(got[aggregate]), len(ids))
		}
	}
	return testenv.FailIf(which == all && len(got) != len(want), "%d aggregates in the stream, %d in the table",
		len(got), len(want))
}
