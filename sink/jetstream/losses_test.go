package jetstream_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"posthaste/internal/testenv"
	"posthaste/sink/jetstream"
)

// TestDiskFull fills the disk of the server, which disables JetStream until it is restarted. The relay is not ready,
// names the disk, and continues when there is room again.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	disk := testenv.Disk(t, 64<<20)
	s := startServer(t, 1)
	s.nodes[0].Dir = disk
	s.start()
	w := newShop(t, "", s)
	p := w.relay()
	w.works()
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 64<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		status, body := p.readyz(t)
		return testenv.FailIf(status != http.StatusServiceUnavailable || !strings.Contains(body, "disk"),
			"readyz is %d: %s", status, body)
	})
	testenv.Must(t, os.Remove(filler))
	s.restart()
	w.works()
	testenv.Eventually(t, time.Minute, func() error {
		status, body := p.readyz(t)
		return testenv.FailIf(status != http.StatusOK, "readyz is %d: %s", status, body)
	})
	w.check()
}

// readyz requests the readiness of a relay, at the address that its log has.
func (p *process) readyz(t *testing.T) (int, string) {
	t.Helper()
	log, err := os.ReadFile(p.log)
	testenv.Must(t, err)
	at := regexp.MustCompile(`"admin":"([^"]+)"`).FindSubmatch(log)
	if at == nil {
		return 0, "it does not listen"
	}
	resp, err := http.Get("http://" + string(at[1]) + "/readyz") //nolint:noctx // of a test
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	testenv.Must(t, err)
	return resp.StatusCode, string(body)
}

// cycles is how many faults a cluster has in a test.
func cycles() int32 {
	if os.Getenv("POSTHASTE_TEST_FULL") != "" {
		return 8
	}
	return 1
}

// TestQuorumLost kills two of three nodes while a lane publishes. Writes fail until the nodes are back.
func TestQuorumLost(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	n := 0
	f.survives(cycles(), func(publishes func(n int)) {
		n++
		publishes(rand.IntN(300))
		f.server.killNode(n % 3)
		f.server.killNode((n + 1) % 3)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		// Without a quorum, Look may still be answered, but every write fails.
		err := f.open(jetstream.Options{}).Adopt(ctx, "outbox.other", f.owner(1), false)
		if err == nil || !strings.Contains(err.Error(), "start its nodes") {
			t.Errorf("got %v, want that nodes are down", err)
		}
		f.server.startNode(n % 3)
		f.server.startNode((n + 1) % 3)
		f.led(order)
	})
}

// TestNodeGoesBack starts one of three nodes with what it had stored earlier, and kills another one at once, so that
// the older node is needed.
func TestNodeGoesBack(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 3)
	n := 0
	f.survives(cycles(), func(publishes func(n int)) {
		n++
		i, other := n%3, (n+1)%3
		publishes(rand.IntN(300))
		f.server.killNode(i)
		restore := f.server.saveNode(i)
		f.server.startNode(i)
		publishes(300)
		f.server.killNode(i)
		publishes(1) // the others continue
		restore()
		f.server.startNode(i)
		f.server.killNode(other)
		publishes(100)
		f.server.startNode(other)
		f.led(order)
	})
}

// TestScanOfNothing reads a stream that does not exist, and one that no direct request can read.
func TestScanOfNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s := f.open(jetstream.Options{})
	if tail, err := s.Tail(t.Context(), order, ""); err != nil || len(tail) > 0 {
		t.Errorf("a stream that does not exist has %v, %v", tail, err)
	}
	f.create(order, nil)
	if tail, err := s.Tail(t.Context(), order, ""); err == nil {
		t.Errorf("a stream without allow_direct has %v", tail)
	}
}

// TestConsumersLost deletes a stream, and with it its consumers. A group is there again before the events are restored:
// it gets all of them. A consumer that is deleted alone stays deleted, and the relay continues.
func TestConsumersLost(t *testing.T) {
	t.Parallel()
	s := startServer(t, 1)
	s.start()
	w := newShop(t, "", s)
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
	group := &nats.ConsumerConfig{Durable: "mailer", AckPolicy: nats.AckExplicitPolicy}
	_, err := js.AddConsumer(name, group)
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
}
