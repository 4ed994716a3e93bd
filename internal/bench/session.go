package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/procfs"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/local"
	"posthaste/internal/redisurl"
	"posthaste/sql"
)

// Options are those of every benchmark.
type Options struct {
	// JSON prints the report as JSON instead of tables.
	JSON bool
	// Runs is the number of repetitions; in each, limits and results take turns.
	Runs int
	// External measures the servers of the settings, in databases and streams that are removed afterwards. Otherwise
	// the benchmark starts servers.
	External bool
	// Dir is the data folder of started servers, on the disk to be measured; empty is the temporary folder.
	Dir string
	// PGBin is the folder of the Postgres programs, RedisBin the program redis-server; if empty, they are searched
	// for.
	PGBin, RedisBin string
	// Cluster starts a Redis cluster of three masters with a replica each.
	Cluster bool
}

// session is one benchmark. Everything it makes contains its name and is removed before it ends.
type session struct {
	options  Options
	config   app.Config
	log      *slog.Logger
	progress *progress
	report   *report

	name   string // 8 hexadecimal digits
	scenes int
	dir    string
	owned  []func() // stop what this process started
	// postgres is the server that this process started; nil if it did not.
	postgres *local.Postgres
	admin    *pgxpool.Pool
	redis    redis.UniversalClient
}

// open starts servers, or connects to those of the settings, and records their properties.
func (b *session) open(ctx context.Context, stderr io.Writer) (err error) {
	c := &b.config
	if b.options.External {
		fmt.Fprintf(stderr,
			"Databases posthaste_bench_%s_* and streams posthaste-bench-%s-* are made, and removed at the "+
				"end.\n", b.name, b.name)
	} else if err := b.start(ctx); err != nil {
		return err
	}
	c.Schema, c.StreamMaxlen = "public", 0 // streams are counted, so they are not trimmed
	c.HTTPAddr = "127.0.0.1:0"
	if c.AdminAddr == "" {
		c.AdminAddr = "127.0.0.1:0"
	}
	if b.admin, err = openPool(ctx, c.PostgresURL, 2); err != nil {
		return err
	}
	if b.redis, err = c.ReaderClient(ctx); err != nil {
		return err
	}
	b.report.At = time.Now().UTC().Truncate(time.Second)
	b.report.Settings["runs"] = b.options.Runs
	b.report.Machine, err = b.facts(ctx)
	return err
}

// start starts a Postgres and a Redis that are durable as in production.
func (b *session) start(ctx context.Context) error {
	bin, err := local.PostgresBin(ctx, b.options.PGBin)
	if err != nil {
		return err
	}
	redisPath, err := local.RedisBin(b.options.RedisBin)
	if err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp(b.options.Dir, "posthaste-bench-"); err != nil {
		return err
	}
	b.owned = append(b.owned, func() { _ = os.RemoveAll(b.dir) })
	// Postgres may run as another user, which needs to pass through the folder.
	if err := os.Chmod(b.dir, 0o711); err != nil { //nolint:gosec // pass through only
		return err
	}
	pgDir, redisDir := filepath.Join(b.dir, "postgres"), filepath.Join(b.dir, "redis")
	for _, d := range []string{pgDir, redisDir} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}
	pg, err := local.StartPostgres(ctx, bin, pgDir, "fsync=on", "synchronous_commit=on", "full_page_writes=on",
		"shared_buffers=256MB", "max_wal_size=4GB")
	if err != nil {
		return err
	}
	b.postgres = pg
	b.owned = append(b.owned, func() { _ = pg.Stop("immediate") })
	b.config.PostgresURL = pg.URL("postgres")
	return b.startRedis(ctx, redisPath, redisDir)
}

func (b *session) startRedis(ctx context.Context, bin, dir string) error {
	if !b.options.Cluster {
		rd, err := local.StartRedis(ctx, bin, dir)
		if err != nil {
			return err
		}
		b.owned = append(b.owned, func() { _ = rd.Kill() })
		b.config.RedisURL = rd.URL()
		return nil
	}
	c, err := local.StartCluster(ctx, bin, dir, local.ClusterOptions{Masters: 3, Replicas: 1})
	if err != nil {
		return err
	}
	b.owned = append(b.owned, func() { _ = c.Kill() })
	b.config.RedisURL = c.URL()
	return nil
}

func openPool(ctx context.Context, url string, size int) (*pgxpool.Pool, error) {
	cfg, err := sql.PoolConfig(url, "public", "bench")
	if err != nil {
		return nil, cli.Usage(err.Error())
	}
	cfg.MaxConns = int32(size) //nolint:gosec // a number of connections
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// close stops what open started.
func (b *session) close() {
	if b.redis != nil {
		_ = b.redis.Close()
	}
	if b.admin != nil {
		b.admin.Close()
	}
	for i := len(b.owned) - 1; i >= 0; i-- {
		b.owned[i]()
	}
}

func (b *session) facts(ctx context.Context) (machine, error) {
	m := machine{
		Cores: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Servers: "its own, on this machine",
		Versions:   map[string]string{"posthaste": b.config.Version, "go": strings.TrimPrefix(runtime.Version(), "go")},
		Durability: map[string]string{"redis_durability": b.config.Durability.String()},
	}
	if b.options.External {
		m.Servers = "external"
	} else if inMemory(b.dir) {
		m.Servers += ", their data in memory, where fsync costs nothing (see --dir)"
	}
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if l, err := fs.LoadAvg(); err == nil {
			m.Load = l.Load1
		}
	}
	rows, err := b.admin.Query(ctx, "SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'fsync', "+
		"'synchronous_commit', 'full_page_writes')")
	if err != nil {
		return m, err
	}
	var name, setting string
	if _, err := pgx.ForEachRow(rows, []any{&name, &setting}, func() error {
		if name == "server_version" {
			m.Versions["postgres"] = setting
		} else {
			m.Durability[name] = setting
		}
		return nil
	}); err != nil {
		return m, err
	}
	nodes, err := redisurl.Nodes(ctx, b.redis)
	if err != nil {
		return m, fmt.Errorf("ask redis: %w", err)
	}
	if n := len(nodes); n > 1 {
		replicas := 0
		for _, node := range nodes {
			if node.Replica {
				replicas++
			}
		}
		m.Servers += fmt.Sprintf(", Redis Cluster of %d masters and %d replicas", n-replicas, replicas)
	}
	info, err := nodes[0].InfoMap(ctx, "server").Result()
	if err != nil {
		return m, fmt.Errorf("ask redis: %w", err)
	}
	m.Versions["redis"] = info["Server"]["redis_version"]
	if v := info["Server"]["valkey_version"]; v != "" {
		m.Versions["redis"] = "valkey " + v
	}
	for _, name := range []string{"appendonly", "appendfsync"} {
		m.Durability[name] = "unknown" // a managed server may keep CONFIG to itself
		if v, err := nodes[0].ConfigGet(ctx, name).Result(); err == nil {
			m.Durability[name] = v[name]
		}
	}
	return m, nil
}

// inMemory reports whether a folder is on a file system in memory.
func inMemory(dir string) bool {
	const tmpfs = 0x01021994
	var st syscall.Statfs_t
	return syscall.Statfs(dir, &st) == nil && st.Type == tmpfs
}

// usage is the resources used up to a moment: processor time in seconds, of this process, the servers, and the whole
// machine, and bytes of WAL. Unlike a rate it hardly depends on other load of the machine.
type usage struct {
	own, postgres, redis float64
	busy, idle           float64
	wal                  float64
}

func (b *session) usage(ctx context.Context) usage {
	var u usage
	if nodes, err := redisurl.Nodes(ctx, b.redis); err == nil {
		for _, n := range nodes {
			info, err := n.InfoMap(ctx, "cpu").Result()
			if err != nil {
				continue
			}
			for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
				v, _ := strconv.ParseFloat(info["CPU"][name], 64)
				u.redis += v
			}
		}
	}
	// The WAL of the whole server: Postgres does not count it by session.
	_ = b.admin.QueryRow(ctx, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8").Scan(&u.wal)
	u.own = ownCPU()
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return u // not Linux
	}
	if s, err := fs.Stat(); err == nil {
		c := s.CPUTotal
		u.idle = c.Idle + c.Iowait
		u.busy = c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal
	}
	if b.postgres != nil {
		u.postgres = b.postgres.CPU()
	}
	return u
}

// ownCPU is this process' processor time, in seconds.
func ownCPU() float64 {
	var own syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &own) != nil {
		return 0
	}
	return time.Duration(own.Utime.Nano() + own.Stime.Nano()).Seconds()
}

// resident is this process' memory in bytes, now and at most since the last reset.
type resident struct{ now, peak float64 }

// memory returns this process' memory; 0 if unknown.
func memory() (m resident) {
	self, err := procfs.Self()
	if err != nil {
		return m // not Linux
	}
	if s, err := self.NewStatus(); err == nil {
		m = resident{now: float64(s.VmRSS), peak: float64(s.VmHWM)}
	}
	return m
}

// resetPeak frees the memory of earlier measurements, and resets the kernel's record of this process' peak. It reports
// whether it succeeded.
func resetPeak() bool {
	debug.FreeOSMemory()
	return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) == nil
}

// note adds the usage since u to a row, per event.
func (u usage) note(w *row, now usage, events int) {
	u.noteCPU(w, now, events)
	if bytes := (now.wal - u.wal) / float64(events); bytes >= 1 { // a smaller value is the server's own activity
		w.is("wal_bytes", bytes)
	}
}

// noteCPU is note without WAL.
func (u usage) noteCPU(w *row, now usage, events int) {
	for name, seconds := range map[string]float64{
		"postgres_cpu_us": now.postgres - u.postgres,
		"redis_cpu_us":    now.redis - u.redis,
	} {
		if us := seconds * 1e6 / float64(events); us >= 0.05 { // a smaller value is of an idle server
			w.is(name, us)
		}
	}
	if busy, idle := now.busy-u.busy, now.idle-u.idle; busy+idle > 0 {
		w.is("busy_percent", 100*busy/(busy+idle))
	}
}
