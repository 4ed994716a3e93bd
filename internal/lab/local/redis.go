package local

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// Redis is a running server that this process owns.
type Redis struct {
	// Dir holds the data.
	Dir string
	// Port is the TCP port on 127.0.0.1. It does not change over Stop and Start.
	Port int
	*Process

	hold   *os.File // of the port; released when the server is garbage-collected
	bus    *os.File // the same of a cluster's second port
	bin    string
	config []string
	tls    *tls.Config // of a client; nil: no TLS
	// user and password are a client's; "" if the caller authenticates by itself.
	user, password string
	// sentinel is set for a Sentinel, which keeps its state in its configuration file.
	sentinel bool
}

// ErrNoRedis means that no redis-server was found.
var ErrNoRedis = errors.New("no redis-server found; install it (Debian, Ubuntu: apt-get install redis-server) " +
	"or name the binary in POSTHASTE_REDIS_BIN")

// RedisBin returns the path of redis-server: path if not empty, else from PATH, else valkey-server from PATH.
func RedisBin(path string) (string, error) {
	if path != "" {
		if _, err := exec.LookPath(path); err != nil {
			return "", fmt.Errorf("redis server %s: %w", path, err)
		}
		return path, nil
	}
	for _, name := range []string{"redis-server", "valkey-server"} {
		if p, err := exec.LookPath(name); err == nil {
			return p, nil
		}
	}
	return "", ErrNoRedis
}

// StartRedis starts a server with its data in dir. Each config line is one of redis.conf. Defaults: append-only file
// with fsync every second, no snapshots, no eviction, loopback only.
func StartRedis(ctx context.Context, bin, dir string, config ...string) (*Redis, error) {
	return StartRedisTLS(ctx, bin, dir, nil, config...)
}

// StartRedisTLS is StartRedis for a server that accepts TLS only, unless client is nil. client is the configuration
// of a client that can connect. The config lines name the server's files.
func StartRedisTLS(ctx context.Context, bin, dir string, client *tls.Config, config ...string) (*Redis, error) {
	return addRedis(ctx, bin, dir, client, func(*Redis) {}, config...)
}

// addRedis is StartRedisTLS for a server that change may change, when its port is reserved. It makes the folder.
func addRedis(
	ctx context.Context, bin, dir string, client *tls.Config, change func(r *Redis), config ...string,
) (*Redis, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	r := &Redis{Dir: dir, bin: bin, tls: client, config: append([]string{
		"bind 127.0.0.1", "dir " + dir, "save \"\"", "appendonly yes", "appendfsync everysec",
		"maxmemory-policy noeviction", "daemonize no", "loglevel notice",
	}, config...)}
	if err := r.reserve(); err != nil {
		return nil, err
	}
	change(r)
	return r, r.Start(ctx)
}

// reserve reserves the server's port, and for a node of a cluster its bus port: Redis ends at once if that is in use.
func (r *Redis) reserve() (err error) {
	for try := 0; ; try++ {
		if r.Port, r.hold, err = ReservePort(); err != nil || !slices.Contains(r.config, clusterEnabled) {
			return err
		}
		if r.Port+above > 65535 {
			_ = r.hold.Close()
			continue
		}
		if _, r.bus, err = reserve(r.Port + above); err == nil || try == 20 {
			return err
		}
		_ = r.hold.Close()
	}
}

// above is the distance from the server's port to its bus port.
const above = 10_000

const clusterEnabled = "cluster-enabled yes"

// Start restarts a stopped server with the same port and data. Further config lines win.
func (r *Redis) Start(ctx context.Context, config ...string) error {
	r.config = append(r.config, config...)
	lines := append([]string{"port " + strconv.Itoa(r.Port)}, r.config...)
	if r.tls != nil {
		lines[0] = "port 0\ntls-port " + strconv.Itoa(r.Port)
	}
	file := filepath.Join(r.Dir, "posthaste-redis.conf")
	args := []string{file}
	if r.sentinel {
		args = append(args, "--sentinel")
	}
	if _, err := os.Stat(file); err != nil || !r.sentinel {
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			return fmt.Errorf("write the redis configuration: %w", err)
		}
	}
	cmd := exec.Command(r.bin, args...) //nolint:noctx // lives until Stop, not until ctx ends
	proc, err := serve(cmd, r.Dir, syscall.SIGKILL, nil)
	if err != nil {
		return err
	}
	r.Process = proc
	return r.await(ctx, r.ping)
}

func (r *Redis) ping(ctx context.Context) error {
	c := r.connect(time.Second)
	defer c.Close()
	err := c.Ping(ctx).Err()
	if err != nil && strings.HasPrefix(err.Error(), "NOAUTH") {
		return nil // it is up; the caller authenticates
	}
	return err
}

// patience bounds a command that is tried once; callers that try again use a second.
const patience = 10 * time.Second

// connect returns a client for this package, whose dials and reads have a timeout.
func (r *Redis) connect(timeout time.Duration) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: r.Addr(), Username: r.user, Password: r.password, MaxRetries: -1, DialTimeout: timeout, DialerRetries: 1,
		ReadTimeout: timeout, ContextTimeoutEnabled: true, TLSConfig: r.tls, Protocol: 2, DisableIdentity: true,
	})
}

// Addr returns host:port.
func (r *Redis) Addr() string { return fmt.Sprintf("127.0.0.1:%d", r.Port) }

// URL returns the URL of database 0: redis://, or rediss:// with TLS.
func (r *Redis) URL() string {
	if r.tls != nil {
		return "rediss://" + r.Addr() + "/0"
	}
	return "redis://" + r.Addr() + "/0"
}

// Stop shuts the server down and waits for it.
func (r *Redis) Stop() error { return r.Process.Stop(syscall.SIGTERM, 30*time.Second) }

// Kill ends the server with SIGKILL and waits for it.
func (r *Redis) Kill() error { return r.Process.Stop(syscall.SIGKILL, 5*time.Second) }
