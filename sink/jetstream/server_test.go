package jetstream_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// node is one process.
type node struct {
	*local.Nats
	// Domain is that of its JetStream.
	Domain string
	// Deny are subjects to which the user "relay" may not publish, and Deaf those to which it may not subscribe. The
	// tests have another user.
	Deny, Deaf []string
	// cluster has the settings of its cluster.
	cluster string
}

// settings returns the lines of the node's configuration.
func (n *node) settings() string {
	text := n.cluster + "max_payload: 1MB\n"
	if n.Domain != "" {
		text += fmt.Sprintf("jetstream { store_dir: %q, sync_interval: always, domain: %s }\n", n.Dir, n.Domain)
	}
	if n.Deny != nil || n.Deaf != nil {
		deny := func(subjects []string) string { // a $ outside quotes is a variable
			return strings.ReplaceAll(fmt.Sprintf("{ deny: %q }", subjects), `" "`, `", "`)
		}
		text += "no_auth_user: test\nauthorization { users: [ { user: test, password: test }, { user: relay, " +
			"password: relay, permissions: { publish: " + deny(n.Deny) + ", subscribe: " + deny(n.Deaf) + " } } ] }\n"
	}
	return text
}

// server is a nats-server, or a cluster of them.
type server struct {
	tb     testing.TB
	folder string
	nodes  []node
}

// startServer makes a server, or a cluster of n nodes. start starts it.
func startServer(tb testing.TB, n int) *server {
	tb.Helper()
	folder, err := os.MkdirTemp("", "posthaste-nats-")
	testenv.Must(tb, err)
	tb.Cleanup(func() { _ = os.RemoveAll(folder) })
	s := &server{tb: tb, folder: folder}
	var ports []int
	var routes []string
	for i := range n {
		dir := filepath.Join(folder, "data", fmt.Sprint("n", i))
		testenv.Must(tb, os.MkdirAll(dir, 0o700))
		nats, err := local.NewNats(testenv.NatsBin(tb), dir)
		testenv.Must(tb, err)
		port, hold, err := local.ReservePort()
		testenv.Must(tb, err)
		tb.Cleanup(func() { _ = hold.Close() })
		s.nodes, ports = append(s.nodes, node{Nats: nats}), append(ports, port)
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", port))
	}
	for i := range s.nodes {
		if n > 1 {
			s.nodes[i].cluster = fmt.Sprintf("server_name: n%d\ncluster { name: test, listen: \"127.0.0.1:%d\", "+
				"routes: [%s] }\n", i, ports[i], strings.Join(routes, ", "))
		}
	}
	tb.Cleanup(s.kill)
	return s
}

func (s *server) url() string {
	var list []string
	for _, n := range s.nodes {
		list = append(list, n.URL())
	}
	return strings.Join(list, ",")
}

// start starts the nodes, and waits until JetStream answers.
func (s *server) start() {
	s.tb.Helper()
	for i := range s.nodes {
		s.startNode(i)
	}
	s.ready()
}

func (s *server) startNode(i int) {
	s.tb.Helper()
	n := &s.nodes[i]
	n.Settings = n.settings()
	testenv.Must(s.tb, n.Launch())
}

func (s *server) ready() {
	s.tb.Helper()
	testenv.Eventually(s.tb, 30*time.Second, func() error {
		nc, err := nats.Connect(s.url())
		if err != nil {
			return err
		}
		defer nc.Close()
		// A stream of all nodes needs all of them.
		body := fmt.Sprintf(`{"name":"READY","subjects":["ready"],"num_replicas":%d}`, len(s.nodes))
		reply, err := nc.Request("$JS.API.STREAM.CREATE.READY", []byte(body), 2*time.Second)
		return testenv.FailIf(err != nil || strings.Contains(string(reply.Data), `"error"`), "nats-server: %v", err)
	})
}

func (s *server) kill() {
	for i := range s.nodes {
		s.killNode(i)
	}
}

func (s *server) killNode(i int) { _ = s.nodes[i].Kill() }

func (s *server) restart() {
	s.tb.Helper()
	s.kill()
	s.start()
}

// save copies what the server has stored, and returns what restarts it with the copy.
func (s *server) save() (restore func()) {
	s.tb.Helper()
	back := s.saveFolder(filepath.Join(s.folder, "data"))
	return func() {
		s.kill()
		back()
		s.start()
	}
}

// saveNode copies what a node that is down has stored, and returns what puts the copy in its place.
func (s *server) saveNode(i int) (restore func()) { return s.saveFolder(s.nodes[i].Dir) }

func (s *server) saveFolder(data string) (restore func()) {
	s.tb.Helper()
	kept := data + "-kept"
	testenv.Must(s.tb, os.CopyFS(kept, os.DirFS(data)))
	return func() {
		testenv.Must(s.tb, os.RemoveAll(data))
		testenv.Must(s.tb, os.Rename(kept, data))
	}
}

// client is a connection of the test's own, which reconnects.
func (s *server) client() *natslog.Log {
	s.tb.Helper()
	nc, err := natslog.Open(s.url())
	testenv.Must(s.tb, err)
	s.tb.Cleanup(nc.Close)
	return nc
}
