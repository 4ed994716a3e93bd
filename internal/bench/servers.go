package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/procfs"
	"golang.org/x/sync/errgroup"

	"posthaste/cdc"
	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/local"
	"posthaste/outbox"
	"posthaste/sql"
)

// writers is how many connections insert at once.
const writers = 8

// open starts servers, or takes those of the settings, and notes what they are.
func (b *session) open(ctx context.Context, stderr io.Writer) (err error) {
	c := &b.config
	if b.options.External {
		fmt.Fprintf(stderr, "Databases posthaste_bench_%s_* and streams posthaste-bench-%s-* are made, and removed at the "+
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
	if b.redis, err = app.ReaderClient(c.RedisURL); err != nil {
		return err
	}
	b.report.At = time.Now().UTC().Truncate(time.Second)
	b.report.Settings["runs"] = b.options.Runs
	b.report.Machine, err = b.facts(ctx)
	return err
}

// start starts a Postgres and a Redis that keep their data as in production.
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
	// Postgres may have to run as another user, who must be able to pass through.
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
	b.owned = append(b.owned, func() { _ = pg.Stop("immediate") })
	rd, err := local.StartRedis(ctx, redisPath, redisDir)
	if err != nil {
		return err
	}
	b.owned = append(b.owned, func() { _ = rd.Kill() })
	b.config.PostgresURL, b.config.RedisURL = pg.URL("postgres"), rd.URL()
	return nil
}

func openPool(ctx context.Context, url string, size int) (*pgxpool.Pool, error) {
	cfg, err := sql.PoolConfig(url, "public", "bench")
	if err != nil {
		return nil, cli.Usage(err.Error())
	}
	cfg.MaxConns = int32(size)
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

// machine says what the figures were measured on. Durability is part of it: without fsync a commit costs nothing.
type machine struct {
	Cores      int               `json:"cores"`
	Platform   string            `json:"platform"`
	Load       float64           `json:"load_average_before"`
	Servers    string            `json:"servers"`
	Versions   map[string]string `json:"versions"`
	Durability map[string]string `json:"durability"`
}

func (m machine) text() string {
	return fmt.Sprintf("machine: %d cores, %s, load average %.1f before the run; servers: %s\nversions: %s\ndurability: "+
		"%s\n", m.Cores, m.Platform, m.Load, m.Servers,
		pairs(m.Versions, "posthaste", "go", "postgres", "redis"),
		pairs(m.Durability, "fsync", "synchronous_commit", "full_page_writes", "appendonly", "appendfsync",
			"redis_durability"))
}

func pairs(m map[string]string, keys ...string) string {
	list := make([]string, len(keys))
	for i, k := range keys {
		list[i] = k + " " + m[k]
	}
	return strings.Join(list, ", ")
}

func (b *session) facts(ctx context.Context) (machine, error) {
	m := machine{
		Cores: runtime.NumCPU(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Servers: "of its own, on this machine",
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
	info, err := b.redis.InfoMap(ctx, "server").Result()
	if err != nil {
		return m, fmt.Errorf("ask redis: %w", err)
	}
	m.Versions["redis"] = info["Server"]["redis_version"]
	if v := info["Server"]["valkey_version"]; v != "" {
		m.Versions["redis"] = "valkey " + v
	}
	for _, name := range []string{"appendonly", "appendfsync"} {
		m.Durability[name] = "unknown" // a managed server may keep CONFIG to itself
		if v, err := b.redis.ConfigGet(ctx, name).Result(); err == nil {
			m.Durability[name] = v[name]
		}
	}
	return m, nil
}

// inMemory reports whether a folder is on a file system that survives nothing.
func inMemory(dir string) bool {
	const tmpfs = 0x01021994
	var st syscall.Statfs_t
	return syscall.Statfs(dir, &st) == nil && st.Type == tmpfs
}

// usage is the processor time that was used up to a moment, in seconds: by this process, by the servers, and by the
// whole machine. Unlike a rate it hardly depends on what else the machine does.
type usage struct {
	own, postgres, redis float64
	busy, idle           float64
}

func (b *session) usage(ctx context.Context) usage {
	var u usage
	if info, err := b.redis.InfoMap(ctx, "cpu").Result(); err == nil {
		for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
			v, _ := strconv.ParseFloat(info["CPU"][name], 64)
			u.redis += v
		}
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return u // not Linux
	}
	if self, err := fs.Self(); err == nil {
		if s, err := self.Stat(); err == nil {
			u.own = s.CPUTime()
		}
	}
	if s, err := fs.Stat(); err == nil {
		c := s.CPUTotal
		u.idle = c.Idle + c.Iowait
		u.busy = c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal
	}
	u.postgres = b.postgresCPU(fs)
	return u
}

// postgresCPU sums up the server that this process started: the postmaster, its children, and those that have ended.
func (b *session) postgresCPU(fs procfs.FS) (seconds float64) {
	if b.dir == "" {
		return 0
	}
	const ticks = 100 // per second, see CPUTime
	text, err := os.ReadFile(filepath.Join(b.dir, "postgres", "data", "postmaster.pid"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	postmaster, _ := strconv.Atoi(first)
	procs, err := fs.AllProcs()
	if err != nil {
		return 0
	}
	for _, p := range procs {
		s, err := p.Stat()
		switch {
		case err != nil: // it has ended meanwhile
		case s.PID == postmaster:
			seconds += s.CPUTime() + float64(s.CUTime+s.CSTime)/ticks
		case s.PPID == postmaster:
			seconds += s.CPUTime()
		}
	}
	return seconds
}

// note adds what was used since u to a row, per event where that is meant.
func (u usage) note(w *row, now usage, events int) {
	for name, seconds := range map[string]float64{
		"postgres_cpu_us": now.postgres - u.postgres,
		"redis_cpu_us":    now.redis - u.redis,
	} {
		if us := seconds * 1e6 / float64(events); us >= 0.05 { // less is a server that had nothing to do
			w.is(name, us)
		}
	}
	if busy, idle := now.busy-u.busy, now.idle-u.idle; busy+idle > 0 {
		w.is("busy_percent", 100*busy/(busy+idle))
	}
}

// scene is one measurement's own database, slot and stream. They are gone when it ends.
type scene struct {
	*session
	name   string
	config app.Config
	pool   *pgxpool.Pool
	slots  *cdc.Slots
}

// in runs do in a new scene and removes it, whatever do says.
func (b *session) in(ctx context.Context, do func(ctx context.Context, s *scene) error) (err error) {
	b.scenes++
	s := &scene{session: b, name: fmt.Sprintf("posthaste_bench_%s_%d", b.name, b.scenes), config: b.config}
	s.config.RelayName = strings.TrimPrefix(s.name, "posthaste_")
	s.config.Slot = s.name
	s.config.StreamPrefix = strings.ReplaceAll(s.name, "_", "-") + "."
	s.config.PostgresURL = inDatabase(b.config.PostgresURL, s.name)
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	if _, err := b.admin.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{s.name}.Sanitize()); err != nil {
		return fmt.Errorf("create database %s: %w", s.name, err)
	}
	if _, err := sql.Migrate(ctx, s.config.PostgresURL, s.config.Schema, s.log); err != nil {
		return err
	}
	if s.pool, err = openPool(ctx, s.config.PostgresURL, 2*writers); err != nil {
		return err
	}
	if s.slots, err = cdc.NewSlots(cdc.SlotsOptions{Pool: s.pool, Slot: s.config.Slot, Logger: s.log}); err != nil {
		return err
	}
	return do(ctx, s)
}

// inDatabase is the connection string with another database in it.
func inDatabase(dsn, name string) string {
	if !strings.Contains(dsn, "://") {
		return dsn + " dbname=" + name // the last one counts
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return dsn // parsed before, by the settings
	}
	u.Path = "/" + name
	q := u.Query()
	q.Del("dbname")
	u.RawQuery = q.Encode()
	return u.String()
}

// remove drops the slot, the database and the keys. It also does after an interruption.
func (s *scene) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var errs []error
	if s.slots != nil {
		errs = append(errs, s.slots.Drop(ctx))
	}
	if s.pool != nil {
		s.pool.Close()
	}
	_, err := s.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{s.name}.Sanitize()+" WITH (FORCE)")
	errs = append(errs, err, s.removeKeys(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w: %w", s.name, errLeft, err)
	}
	return nil
}

// removeKeys removes the stream, its gate, and whatever else relay and consumer keep under its name.
func (s *scene) removeKeys(ctx context.Context) error {
	var keys []string
	all := s.redis.Scan(ctx, 0, "*"+s.config.StreamPrefix+"*", 10_000).Iterator()
	for all.Next(ctx) {
		keys = append(keys, all.Val())
	}
	if err := all.Err(); err != nil || len(keys) == 0 {
		return err
	}
	return s.redis.Unlink(ctx, keys...).Err()
}

// stream is where the scene's events go.
func (s *scene) stream() string { return outbox.StreamName(s.config.StreamPrefix, aggregateType) }

// relayed runs do beside a relay in the mode. The relay is the one that `posthaste relay` runs, in this process,
// without the sync of credits.
func (s *scene) relayed(ctx context.Context, mode outbox.Mode, do func(ctx context.Context, p *app.Relay) error) error {
	if err := sql.Register(ctx, s.pool, s.config.RelayName); err != nil {
		return err
	}
	if err := sql.SetDesired(ctx, s.pool, s.config.RelayName, mode); err != nil {
		return err
	}
	p, err := app.NewRelay(ctx, s.config, s.log)
	if err != nil {
		return err
	}
	defer p.Close()
	rctx, stop := context.WithCancel(ctx)
	g, gctx := errgroup.WithContext(rctx)
	g.Go(func() error { return p.RunWithoutCredits(gctx) })
	err = do(gctx, p)
	stop()
	// What the relay ended with says more than that the rest was cancelled for it.
	if werr := g.Wait(); werr != nil && !errors.Is(werr, context.Canceled) {
		return werr
	}
	return err
}

// until waits until cond holds, and gives up when nothing changes for a minute. cond also returns how far it is.
func (s *scene) until(ctx context.Context, p *app.Relay, what string,
	cond func() (holds bool, far int64, err error),
) error {
	last, changed := int64(-1), time.Now()
	for {
		holds, far, err := cond()
		if holds || err != nil {
			return err
		}
		if far != last {
			last, changed = far, time.Now()
		}
		if time.Since(changed) > time.Minute {
			h := p.Health()
			return fmt.Errorf("nothing has changed for a minute while waiting for %s; the relay says: %v %v", what, h.Reasons,
				h.Degraded)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// inMode waits until the relay is in the mode.
func (s *scene) inMode(ctx context.Context, p *app.Relay, mode outbox.Mode) error {
	return s.until(ctx, p, "mode "+string(mode), func() (bool, int64, error) {
		return p.Status().Mode == mode, 0, nil
	})
}

// published waits until the stream has n entries.
func (s *scene) published(ctx context.Context, p *app.Relay, n int) error {
	return s.until(ctx, p, "every event in the stream", func() (bool, int64, error) {
		have, err := s.redis.XLen(ctx, s.stream()).Result()
		s.progress.count.Store(have)
		return have >= int64(n), have, err
	})
}

// settled waits until the outbox is empty.
func (s *scene) settled(ctx context.Context, p *app.Relay) error {
	return s.until(ctx, p, "the outbox to be empty", func() (bool, int64, error) {
		held := int64(p.Status().Inflight)
		if held > 0 {
			return false, held, nil
		}
		var left bool
		err := s.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox)").Scan(&left)
		return !left, -1, err
	})
}

// count holds the stream and the history against the n events that were written.
func (s *scene) count(ctx context.Context, n int) (check, error) {
	c := check{Committed: n}
	seen := make([]bool, n)
	for from := "-"; ; {
		page, err := s.redis.XRangeN(ctx, s.stream(), from, "+", 1000).Result()
		if err != nil {
			return c, err
		}
		if len(page) == 0 {
			break
		}
		for _, m := range page {
			id, _ := m.Values["id"].(string)
			switch i, ok := eventNumber(id); {
			case !ok || i >= n:
				c.Unknown++
			case seen[i]:
				c.Repeated++
			default:
				seen[i] = true
				c.Found++
			}
		}
		from = "(" + page[len(page)-1].ID
	}
	c.Lost = n - c.Found
	err := s.pool.QueryRow(ctx, "SELECT count(*) FROM outbox_history").Scan(&c.Recorded)
	if s.config.History == 0 {
		c.Recorded = n // there is none
	}
	return c, err
}
