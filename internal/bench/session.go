package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/procfs"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/redisurl"
	"posthaste/sql"
)

// Options are those of every benchmark.
type Options struct {
	JSON     bool   `name:"json" help:"Print JSON instead of tables."`
	Runs     int    `help:"Repetitions; in each, limits and results take turns." default:"3"`
	External bool   // see help.txt
	Dir      string // see help.txt
	PGBin    string `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
	Cluster  bool   `help:"Start a Redis Cluster, of three masters and three replicas, instead of one Redis."`
}

// Sink is where a relay publishes to.
type Sink struct {
	Sink    string `help:"Where the relay publishes to: redis or nats." enum:"redis,nats" default:"redis"`
	NatsBin string `help:"The nats-server program." env:"POSTHASTE_NATS_BIN"`
}

func (s Sink) nats() bool { return s.Sink == "nats" }

// session is one benchmark. Everything it makes contains its name and is removed before it ends.
type session struct {
	options  Options
	sink     Sink
	config   app.Config
	log      *slog.Logger
	progress *progress
	report   *report

	name   string // 8 hexadecimal digits
	scenes int
	// servers are those that this process started; nil if it did not.
	servers *local.Servers
	admin   *pgxpool.Pool
	redis   redis.UniversalClient
	// nats is a connection to NATS at sinkURL; nil if the relay publishes to Redis.
	nats    *natslog.Log
	sinkURL string
}

// open starts servers, or connects to those of the settings, and records their properties.
func (b *session) open(ctx context.Context, stderr io.Writer) (err error) {
	c := &b.config
	if b.options.External {
		fmt.Fprintf(stderr, "Databases posthaste_bench_%s_* and streams posthaste-bench-%s-* are made, and removed at "+
			"the end.\n", b.name, b.name)
	} else {
		o := b.options
		b.servers, err = local.Open(ctx, local.ServersOptions{
			Name: "bench", Dir: o.Dir, PGBin: o.PGBin, RedisBin: o.RedisBin, Cluster: o.Cluster,
			Settings: local.Durable, Nats: b.sink.nats(), NatsBin: b.sink.NatsBin,
		})
		if err != nil {
			return err
		}
		c.PostgresURL, c.RedisURL = b.servers.Postgres.URL("postgres"), b.servers.RedisURL()
	}
	if b.sink.nats() {
		if err := b.openNats(); err != nil {
			return err
		}
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
	if b.nats != nil {
		b.nats.Close()
	}
	if b.admin != nil {
		b.admin.Close()
	}
	b.servers.Close()
}

func (b *session) facts(ctx context.Context) (machine, error) {
	m := machine{
		Cores: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Servers: "its own, on this machine",
		Durability: map[string]string{"redis_durability": b.config.RedisDurability.String()},
	}
	if b.options.External {
		m.Servers = "external"
	} else if inMemory(b.servers.Dir) {
		m.Servers += ", their data in memory, where fsync costs nothing (see --dir)"
	}
	if fs, err := procfs.NewDefaultFS(); err == nil {
		if l, err := fs.LoadAvg(); err == nil {
			m.Load = l.Load1
		}
	}
	for _, name := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		var setting string
		if err := b.admin.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&setting); err != nil {
			return m, err
		}
		m.Durability[name] = setting
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
	if m.Versions, err = local.Versions(ctx, b.config.Version, b.admin, nodes[0].Client); err != nil {
		return m, err
	}
	if b.nats != nil {
		m.Versions["nats"] = b.nats.ConnectedServerVersion()
	}
	for _, name := range []string{"appendonly", "appendfsync"} {
		m.Durability[name] = "unknown" // a managed server may keep CONFIG to itself
		if v, err := nodes[0].Client.ConfigGet(ctx, name).Result(); err == nil {
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
	own, postgres, redis, nats float64
	busy, idle                 float64
	wal                        float64
}

func (b *session) usage(ctx context.Context) usage {
	var u usage
	if nodes, err := redisurl.Nodes(ctx, b.redis); err == nil {
		for _, n := range nodes {
			u.redis += local.RedisCPU(ctx, n.Client)
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
	if b.servers != nil {
		u.postgres = b.servers.Postgres.CPU()
		if b.servers.Nats != nil {
			u.nats = b.servers.Nats.CPU()
		}
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

// memory returns this process' resident memory in bytes, now and at most since the last reset; 0 if unknown.
func memory() (now, peak float64) {
	self, err := procfs.Self()
	if err != nil {
		return 0, 0 // not Linux
	}
	s, _ := self.NewStatus()
	return float64(s.VmRSS), float64(s.VmHWM)
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
		"nats_cpu_us":     now.nats - u.nats,
	} {
		if us := seconds * 1e6 / float64(events); us >= 0.05 { // a smaller value is of an idle server
			w.is(name, us)
		}
	}
	if busy, idle := now.busy-u.busy, now.idle-u.idle; busy+idle > 0 {
		w.is("busy_percent", 100*busy/(busy+idle))
	}
}
