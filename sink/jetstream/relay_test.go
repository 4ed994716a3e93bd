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

	"posthaste/internal/lab/testenv"
	"posthaste/sink/jetstream"
)

// The program publishes to NATS, and needs no Redis. Each event is in the stream once and in order, through changes of
// the mode, relays and servers that are killed, and a deleted stream. Its consumers go as well: a group is there again
// before the events are restored, and gets all of them. A consumer that is deleted alone stays deleted.
func TestRelay(t *testing.T) {
	t.Parallel()
	s := startServer(t, 1)
	s.start()
	w := newShop(t, "", s)
	first := w.relay()
	for _, mode := range []string{"cdc", "poll", "cdc", "poll"} {
		w.db.Exec(t, "UPDATE relay_state SET desired_mode = $1", mode)
		testenv.Eventually(t, time.Minute, func() error {
			active := testenv.Value[string](t, w.db, "SELECT coalesce((SELECT active_mode FROM relay_state), '')")
			return testenv.FailIf(active != mode, "the mode is %q, want %s", active, mode)
		})
		w.works()
	}
	first.kill()
	second := w.relay()
	w.works()
	s.restart()
	w.works()
	w.db.Exec(t, "UPDATE relay_state SET desired_mode = 'auto'")
	second.kill()
	w.relay()
	w.works()
	js, name := s.js(), jetstream.StreamName(order)
	noted := func(want bool) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			const query = "SELECT groups::text LIKE '%mailer%' FROM outbox_stream WHERE stream = $1"
			got := testenv.Value[bool](t, w.db, query, order)
			return testenv.FailIf(got != want, "the group is noted: %v", got)
		})
	}
	_, err := js.AddConsumer(name, &nats.ConsumerConfig{Durable: "mailer", AckPolicy: nats.AckExplicitPolicy})
	testenv.Must(t, err)
	noted(true)
	testenv.Must(t, js.DeleteStream(name))
	w.works()
	w.check()
	i, err := js.ConsumerInfo(name, "mailer")
	testenv.Must(t, err)
	events := testenv.Value[uint64](t, w.db, "SELECT count(*) FROM outbox WHERE aggregate_type = 'order'")
	if i.NumPending != events {
		t.Errorf("the group has %d events before it, want %d", i.NumPending, events)
	}
	testenv.Must(t, js.DeleteConsumer(name, "mailer"))
	noted(false)
	w.works()
	run := func(command ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, w.exe, append(command, w.flags...)...).CombinedOutput()
		return string(out), err
	}
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

func (s *server) js() nats.JetStreamContext { return s.client().JS }

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
	if err != nil { // it was deleted, and is not there again
		return err
	}
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
