package jetstream_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"posthaste/internal/testenv"
)

// serve is the environment variable that makes this binary a server. It has the settings of a node.
const serve = "POSTHASTE_TEST_NATS_SERVER"

func TestMain(m *testing.M) {
	if settings := os.Getenv(serve); settings != "" {
		runServer(settings)
		return
	}
	os.Exit(testenv.Main(m))
}

// node are the settings of one process.
type node struct {
	Name, Folder, Domain string
	Port                 int
	// Cluster is the port for the other nodes, and Routes are those of all nodes; 0 without a cluster.
	Cluster int
	Routes  []int
	// Deny are subjects to which the user "relay" may not publish, and Deaf those to which it may not subscribe. The
	// tests have another user.
	Deny, Deaf []string
}

// runServer is a server until its process is killed, or its standard input ends with the test's process.
func runServer(settings string) {
	var n node
	err := json.Unmarshal([]byte(settings), &n)
	o := &natsserver.Options{
		ServerName: n.Name, Host: "127.0.0.1", Port: n.Port, JetStream: true, StoreDir: n.Folder, SyncAlways: true,
		JetStreamDomain: n.Domain, NoSigs: true, NoLog: true,
	}
	if n.Deny != nil || n.Deaf != nil {
		o.NoAuthUser = "test"
		o.Users = []*natsserver.User{{Username: "test", Password: "test"}, {
			Username: "relay", Password: "relay", Permissions: &natsserver.Permissions{
				Publish:   &natsserver.SubjectPermission{Deny: n.Deny},
				Subscribe: &natsserver.SubjectPermission{Deny: n.Deaf},
			},
		}}
	}
	if n.Cluster > 0 {
		o.Cluster = natsserver.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: n.Cluster}
		for _, port := range n.Routes {
			o.Routes = append(o.Routes, &url.URL{Scheme: "nats", Host: fmt.Sprint("127.0.0.1:", port)})
		}
	}
	var s *natsserver.Server
	if err == nil {
		s, err = natsserver.NewServer(o)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s.Start()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// server is a nats-server in a process of its own, or a cluster of them.
type server struct {
	tb     testing.TB
	folder string
	nodes  []node
	cmds   []*exec.Cmd
	stdin  []io.Closer
}

// startServer starts a server, or a cluster of n nodes.
func startServer(tb testing.TB, n int) *server {
	tb.Helper()
	folder, err := os.MkdirTemp("", "posthaste-nats-")
	testenv.Must(tb, err)
	tb.Cleanup(func() { _ = os.RemoveAll(folder) })
	s := &server{tb: tb, folder: folder, cmds: make([]*exec.Cmd, n), stdin: make([]io.Closer, n)}
	var ports []int
	for i := range 2 * n {
		l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // of a test
		testenv.Must(tb, err)
		defer func() { _ = l.Close() }()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		if i < n {
			name := fmt.Sprint("n", i)
			s.nodes = append(s.nodes, node{Name: name, Folder: filepath.Join(folder, "data", name), Port: ports[i]})
		}
	}
	for i := range s.nodes {
		if n > 1 {
			s.nodes[i].Cluster, s.nodes[i].Routes = ports[n+i], ports[n:]
		}
	}
	tb.Cleanup(s.kill)
	return s
}

func (s *server) url() string {
	var list []string
	for _, n := range s.nodes {
		list = append(list, fmt.Sprintf("nats://127.0.0.1:%d", n.Port))
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
	exe, err := os.Executable()
	testenv.Must(s.tb, err)
	settings, err := json.Marshal(s.nodes[i])
	testenv.Must(s.tb, err)
	cmd := exec.Command(exe) //nolint:noctx // it is killed
	cmd.Env = append(os.Environ(), serve+"="+string(settings))
	cmd.Stderr = os.Stderr
	s.stdin[i], err = cmd.StdinPipe()
	testenv.Must(s.tb, err)
	testenv.Must(s.tb, cmd.Start())
	s.cmds[i] = cmd
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

func (s *server) killNode(i int) {
	if s.cmds[i] == nil {
		return
	}
	_ = s.cmds[i].Process.Kill()
	_ = s.cmds[i].Wait()
	_ = s.stdin[i].Close()
	s.cmds[i] = nil
}

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
func (s *server) saveNode(i int) (restore func()) { return s.saveFolder(s.nodes[i].Folder) }

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
func (s *server) client() *nats.Conn {
	s.tb.Helper()
	nc, err := nats.Connect(s.url(), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	testenv.Must(s.tb, err)
	s.tb.Cleanup(nc.Close)
	return nc
}
