package local

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// Servers are a Postgres, a Redis and possibly a NATS, with their data in one folder.
type Servers struct {
	// Dir is the folder. RedisBin is the program of Redis.
	Dir, RedisBin string
	Postgres      *Postgres
	// Redis is nil if there is a Cluster instead.
	Redis   *Redis
	Cluster *Cluster
	// Nats is nil without ServersOptions.Nats.
	Nats *Nats
}

// ServersOptions are those of Open.
type ServersOptions struct {
	// Name is a part of the folder's name. Dir is where the folder is made, "" is the folder for temporary files.
	Name, Dir string
	// PGBin is the folder of the Postgres programs, RedisBin the program redis-server; if empty, they are searched for.
	PGBin, RedisBin string
	// Nats starts a nats-server, too: the program NatsBin, or that in PATH.
	Nats    bool
	NatsBin string
	// Cluster starts a Redis Cluster of three masters with a replica each.
	Cluster bool
	// Settings are those of Postgres, Config are lines of redis.conf.
	Settings, Config []string
}

// Durable are settings of Postgres as in production, with room for a load.
var Durable = []string{
	"fsync=on", "synchronous_commit=on", "full_page_writes=on", "shared_buffers=256MB", "max_wal_size=4GB",
}

// Open starts the servers. If that fails, it has removed what it made.
func Open(ctx context.Context, o ServersOptions) (s *Servers, err error) {
	s = &Servers{}
	defer func() {
		if err != nil {
			s.Close()
			s = nil
		}
	}()
	bin, err := PostgresBin(ctx, o.PGBin)
	if err == nil {
		s.RedisBin, err = RedisBin(o.RedisBin)
	}
	if err == nil && o.Nats {
		o.NatsBin, err = NatsBin(o.NatsBin)
	}
	if err != nil {
		return s, err
	}
	if s.Dir, err = os.MkdirTemp(o.Dir, "posthaste-"+o.Name+"-"); err != nil {
		return s, fmt.Errorf("make a folder: %w", err)
	}
	// Postgres may run as another user, which needs to pass through the folder.
	if err := os.Chmod(s.Dir, 0o711); err != nil { //nolint:gosec // pass through only
		return s, fmt.Errorf("open the folder: %w", err)
	}
	in := func(name string, start func(dir string) error) {
		var dir string
		if err == nil {
			dir, err = s.Folder(name)
		}
		if err == nil {
			err = start(dir)
		}
	}
	in("postgres", func(dir string) (err error) {
		s.Postgres, err = StartPostgres(ctx, bin, dir, o.Settings...)
		return err
	})
	in("redis", func(dir string) (err error) {
		if o.Cluster {
			s.Cluster, err = StartCluster(ctx, s.RedisBin, dir, ClusterOptions{Masters: 3, Replicas: 1})
		} else {
			s.Redis, err = StartRedis(ctx, s.RedisBin, dir, o.Config...)
		}
		return err
	})
	if o.Nats {
		in("nats", func(dir string) (err error) {
			s.Nats, err = StartNats(ctx, o.NatsBin, dir)
			return err
		})
	}
	return s, err
}

// Folder makes a folder below Dir.
func (s *Servers) Folder(name string) (string, error) {
	dir := filepath.Join(s.Dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a folder: %w", err)
	}
	return dir, nil
}

// RedisURL is a client's URL of Redis.
func (s *Servers) RedisURL() string {
	if s.Cluster != nil {
		return s.Cluster.URL()
	}
	return s.Redis.URL()
}

// Close stops the servers and removes their data.
func (s *Servers) Close() {
	if s == nil {
		return
	}
	if s.Cluster != nil {
		_ = s.Cluster.Kill()
	}
	if s.Redis != nil {
		_ = s.Redis.Kill()
	}
	if s.Nats != nil {
		_ = s.Nats.Kill()
	}
	if s.Postgres != nil {
		_ = s.Postgres.Stop("immediate")
	}
	_ = os.RemoveAll(s.Dir)
}

// Versions returns the versions of posthaste, which is given, of Go, and of a Postgres and a Redis; that of Valkey
// begins with "valkey ".
func Versions(
	ctx context.Context, posthaste string, pg interface {
		QueryRow(ctx context.Context, query string, args ...any) pgx.Row
	}, rd redis.Cmdable,
) (map[string]string, error) {
	v := map[string]string{"posthaste": posthaste, "go": strings.TrimPrefix(runtime.Version(), "go")}
	var postgres string
	if err := pg.QueryRow(ctx, "SHOW server_version").Scan(&postgres); err != nil {
		return nil, fmt.Errorf("ask postgres: %w", err)
	}
	info, err := rd.InfoMap(ctx, "server").Result()
	if err != nil {
		return nil, fmt.Errorf("ask redis: %w", err)
	}
	v["postgres"], v["redis"] = postgres, info["Server"]["redis_version"]
	if valkey := info["Server"]["valkey_version"]; valkey != "" {
		v["redis"] = "valkey " + valkey
	}
	return v, nil
}
