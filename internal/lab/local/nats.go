package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
)

// Nats is a running nats-server with JetStream that this process owns. It writes to disk before it answers.
type Nats struct {
	// Dir holds the data.
	Dir string
	// Port is the TCP port on 127.0.0.1. It does not change when the server is started again.
	Port int
	// Settings are lines of the configuration in addition to, or in place of, those of every server. The next start
	// applies them.
	Settings string
	*Process

	hold *os.File // of the port
	bin  string
}

// errNoNats means that no nats-server was found.
var errNoNats = errors.New("no nats-server found; install it (go install github.com/nats-io/nats-server/v2@latest) " +
	"or name the binary in POSTHASTE_NATS_BIN")

// NatsBin returns the path of nats-server: path if not empty, else from PATH.
func NatsBin(path string) (string, error) {
	found, err := exec.LookPath(path)
	switch {
	case path == "":
		if found, err = exec.LookPath("nats-server"); err != nil {
			return "", errNoNats
		}
	case err != nil:
		return "", fmt.Errorf("nats server %s: %w", path, err)
	}
	return found, nil
}

// natsConfig is the configuration. An event of 1 MB has headers besides its payload.
const natsConfig = `listen: "127.0.0.1:%d"
max_payload: 8MB
jetstream { store_dir: %s, sync_interval: always }
`

// NewNats reserves the port of a server with its data in dir, and does not start it.
func NewNats(bin, dir string) (n *Nats, err error) {
	n = &Nats{Dir: dir, bin: bin}
	n.Port, n.hold, err = ReservePort()
	return n, err
}

// StartNats starts a server with its data in dir.
func StartNats(ctx context.Context, bin, dir string) (*Nats, error) {
	n, err := NewNats(bin, dir)
	if err != nil {
		return nil, err
	}
	return n, n.Start(ctx)
}

// Launch starts a server that does not run, and does not wait for an answer: a node of a cluster needs others for that.
func (n *Nats) Launch() error {
	file := filepath.Join(n.Dir, "posthaste-nats.conf")
	config := fmt.Sprintf(natsConfig, n.Port, strconv.Quote(n.Dir)) + n.Settings
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return fmt.Errorf("write the nats configuration: %w", err)
	}
	cmd := exec.Command(n.bin, "-c", file) //nolint:noctx // lives until Kill, not until ctx ends
	proc, err := serve(cmd, n.Dir, syscall.SIGKILL, nil)
	if err == nil {
		n.Process = proc
	}
	return err
}

// Start starts a server that does not run, with the same port and data as before.
func (n *Nats) Start(ctx context.Context) error {
	if err := n.Launch(); err != nil {
		return err
	}
	return n.await(ctx, n.answers)
}

// answers returns an error unless JetStream answers.
func (n *Nats) answers(context.Context) error {
	nc, err := nats.Connect(n.URL())
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := nc.JetStream(nats.MaxWait(time.Second))
	if err == nil {
		_, err = js.AccountInfo()
	}
	return err
}

// URL returns the URL of the server.
func (n *Nats) URL() string { return fmt.Sprintf("nats://127.0.0.1:%d", n.Port) }

// Kill ends the server with SIGKILL and waits for it.
func (n *Nats) Kill() error { return n.Stop(syscall.SIGKILL, 5*time.Second) }
