package jetstream_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/sink/jetstream"
)

// TestDiskFull fills the disk of the server.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	fillDisks(t, 1, []int{0})
}

// TestClusterDisksFull fills the disks of a follower, and of a majority with the leader; the full test also those of
// the leader, of a majority without it, and of all nodes.
func TestClusterDisksFull(t *testing.T) {
	t.Parallel()
	cases := [][]int{{1}, {0, 1}}
	if cycles() > 1 {
		cases = append(cases, []int{0}, []int{1, 2}, []int{0, 1, 2})
	}
	fillDisks(t, 3, cases...)
}

// fillDisks fills the disks of nodes, which cases number from the leader of the stream on. A node of a cluster then
// disables JetStream until it is restarted. While a quorum can write, the relay publishes. Otherwise it is not ready,
// and names the disk. It continues when there is room and the nodes are restarted.
func fillDisks(t *testing.T, nodes int, cases ...[]int) {
	t.Helper()
	const size = 64 << 20
	s := startServer(t, nodes)
	for i := range s.nodes {
		s.nodes[i].Dir = testenv.Disk(t, size)
	}
	s.start()
	w := newShop(t, "", s, fmt.Sprint("--sink-replicas=", nodes))
	p := w.relay()
	ready := func(want int, cause string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, func() error {
			status, body := p.readyz(t)
			return testenv.FailIf(status != want || !strings.Contains(body, cause), "readyz is %d: %s", status, body)
		})
	}
	for _, full := range cases {
		w.works()
		info, err := s.js().StreamInfo(jetstream.StreamName(order))
		testenv.Must(t, err)
		leader := 0
		if nodes > 1 {
			_, err = fmt.Sscanf(info.Cluster.Leader, "n%d", &leader)
			testenv.Must(t, err)
		}
		var fillers []string
		for i, n := range full {
			full[i] = (leader + n) % nodes
			fillers = append(fillers, filepath.Join(s.nodes[full[i]].Dir, "filler"))
			if err := os.WriteFile(fillers[i], make([]byte, size), 0o600); !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("the disk is not full: %v", err)
			}
		}
		for _, i := range full {
			if nodes == 1 {
				continue // it keeps JetStream, and stores nothing
			}
			testenv.Eventually(t, time.Minute, func() error {
				greeting, err := s.greeting(i)
				return testenv.FailIf(err != nil || strings.Contains(greeting, `"jetstream":true`),
					"node %d has JetStream: %s, %v", i, greeting, err)
			})
		}
		if 2*len(full) < nodes {
			w.works()
			ready(http.StatusOK, "")
		} else {
			ready(http.StatusServiceUnavailable, "disk")
		}
		for i, n := range full {
			testenv.Must(t, os.Remove(fillers[i]))
			s.killNode(n)
			s.startNode(n)
		}
		w.works()
		ready(http.StatusOK, "")
	}
	w.check()
}

// greeting returns what a node sends to a client first.
func (s *server) greeting(i int) (string, error) {
	c, err := net.Dial("tcp", strings.TrimPrefix(s.nodes[i].URL(), "nats://")) //nolint:noctx // of a test
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	return bufio.NewReader(c).ReadString('\n')
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
		// Without a quorum, Look may still be answered, but every write fails, or is made after the nodes are back.
		err := f.open(jetstream.Options{}).Adopt(ctx, fmt.Sprint("outbox.other", n), f.Owner(1), false)
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
