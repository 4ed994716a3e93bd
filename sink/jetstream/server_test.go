package jetstream_test

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"posthaste/internal/testenv"
)

// serve is the environment variable that makes this binary a server: the folder and the port.
const serve = "POSTHASTE_TEST_NATS_SERVER"

func TestMain(m *testing.M) {
	if at := os.Getenv(serve); at != "" {
		runServer(at)
		return
	}
	os.Exit(testenv.Main(m))
}

// runServer is a server until its process is killed, or its standard input ends with the test's process.
func runServer(at string) {
	var port int
	var folder string
	_, err := fmt.Sscanf(at, "%d %s", &port, &folder)
	var s *natsserver.Server
	if err == nil {
		s, err = natsserver.NewServer(&natsserver.Options{
			Host: "127.0.0.1", Port: port, JetStream: true, StoreDir: folder, SyncAlways: os.Getenv("NATS_LAZY") == "",
			NoSigs: true, NoLog: true,
		})
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	s.Start()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// server is a nats-server in a process of its own.
type server struct {
	tb     testing.TB
	folder string
	port   int
	cmd    *exec.Cmd
	stdin  io.Closer
}

func startServer(tb testing.TB) *server {
	tb.Helper()
	folder, err := os.MkdirTemp("", "posthaste-nats-")
	testenv.Must(tb, err)
	tb.Cleanup(func() { _ = os.RemoveAll(folder) })
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // of a test
	testenv.Must(tb, err)
	s := &server{tb: tb, folder: folder, port: l.Addr().(*net.TCPAddr).Port}
	testenv.Must(tb, l.Close())
	s.start()
	tb.Cleanup(s.kill)
	return s
}

func (s *server) url() string { return fmt.Sprintf("nats://127.0.0.1:%d", s.port) }

func (s *server) start() {
	s.tb.Helper()
	exe, err := os.Executable()
	testenv.Must(s.tb, err)
	s.cmd = exec.Command(exe) //nolint:noctx // it is killed
	s.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", serve, s.port, filepath.Join(s.folder, "data")))
	s.cmd.Stderr = os.Stderr
	s.stdin, err = s.cmd.StdinPipe()
	testenv.Must(s.tb, err)
	testenv.Must(s.tb, s.cmd.Start())
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		nc, err := nats.Connect(s.url())
		if err == nil {
			_, err = nc.Request("$JS.API.INFO", nil, time.Second)
			nc.Close()
		}
		if err == nil {
			return
		}
		if time.Now().After(end) {
			s.tb.Fatalf("nats-server does not start: %v", err)
		}
	}
}

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	_ = s.stdin.Close()
}

func (s *server) restart() {
	s.tb.Helper()
	s.kill()
	s.start()
}

// save copies what the server has stored, and returns what restarts it with the copy.
func (s *server) save() (restore func()) {
	s.tb.Helper()
	data, kept := filepath.Join(s.folder, "data"), filepath.Join(s.folder, "kept")
	testenv.Must(s.tb, os.CopyFS(kept, os.DirFS(data)))
	return func() {
		s.kill()
		testenv.Must(s.tb, os.RemoveAll(data))
		testenv.Must(s.tb, os.Rename(kept, data))
		s.start()
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
