// Package testenv gives tests real servers: Postgres, Redis, and a fault-injecting proxy between. It mocks neither.
//
// One Postgres server serves a test binary, with a migrated database per test; a Redis server is per test (it starts in
// milliseconds). A test that stops or reconfigures Postgres takes a server of its own. Every binary that uses the
// package has
//
//	func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }
//
// POSTHASTE_TEST_PG_BIN and POSTHASTE_TEST_REDIS_BIN select other servers than those found. Slots are per server, not
// per database: use Database.Relay as the relay's name.
//
// Temporary files, those of child processes too, are in memory if there is room, unless TMPDIR is set. Each test has
// a database of 300 files, and some file systems create files slowly just after many were deleted. No test crashes
// the machine, so that makes no difference.
package testenv

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	mrand "math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/local"
	"posthaste/sql"
)

// home is the folder of what all tests of this process share. Main makes and removes it.
var home string

var counter atomic.Int64

// fast are settings that make a test server fast. It needs to survive its own crash, but not the machine's.
var fast = []string{
	"fsync=off", "full_page_writes=off", "shared_buffers=64MB", "max_wal_size=4GB",
	"log_min_messages=warning", "autovacuum_naptime=5s",
	"jit=off",                       // as in the product's own sessions
	"max_locks_per_transaction=256", // the traps of TestNothingPlantedIsCalled are dropped at once
}

// quiet drops the log of the Redis client: tests cut its connections all the time.
type quiet struct{}

// Printf implements the client's logger.
func (quiet) Printf(context.Context, string, ...any) {}

// Main runs the tests and stops the shared server. Use it as the whole of TestMain.
func Main(m *testing.M) int {
	redis.SetLogger(quiet{})
	if os.Getenv("TMPDIR") == "" {
		if dir := inMemory("/dev/shm"); dir != "" {
			defer func() { _ = os.RemoveAll(dir) }()
			_ = os.Setenv("TMPDIR", dir) // otherwise they are on disk
		}
	}
	var err error
	if home, err = os.MkdirTemp("", "posthaste-"); err == nil {
		err = os.Chmod(home, 0o711) // Postgres may run as another user
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(home) }()
	defer func() {
		if shared != nil {
			_ = shared.Stop("immediate")
		}
	}()
	return m.Run()
}

// Server is a Postgres server of a test's own.
type Server struct {
	*local.Postgres
}

// NewServer starts a Postgres server for this test alone.
func NewServer(tb testing.TB, settings ...string) *Server {
	tb.Helper()
	pg, err := startPostgres(folder(tb, "pg"), settings...)
	Must(tb, err)
	tb.Cleanup(func() { _ = pg.Stop("immediate") })
	return &Server{pg}
}

// Snapshot returns a stopped server with a copy of s, including its slots. s is restarted.
func (s *Server) Snapshot(tb testing.TB) *Server {
	tb.Helper()
	c, err := s.Copy(tb.Context(), folder(tb, "pg"))
	Must(tb, err)
	return &Server{c}
}

// Standby starts an asynchronous standby of s, which connects to s through the address. s is restarted. Each setting
// is "name=value".
func (s *Server) Standby(tb testing.TB, through string, settings ...string) *Server {
	tb.Helper()
	c := s.Snapshot(tb)
	host, port, _ := strings.Cut(through, ":")
	// Slots are synchronized through the database.
	primary := fmt.Sprintf("host=%s port=%s user=postgres password=%s dbname=postgres", host, port, s.Password)
	signal := filepath.Join(c.Dir, "data", "standby.signal")
	err := os.WriteFile(signal, nil, 0o600)
	if err == nil && os.Geteuid() == 0 {
		err = os.Chmod(signal, 0o666)
	}
	if err == nil {
		err = c.Start(tb.Context(), append([]string{"primary_conninfo=" + primary, "hot_standby=on"}, settings...)...)
	}
	Must(tb, err)
	tb.Cleanup(func() { _ = c.Stop("immediate") })
	return c
}

// Upgrade stops s, and moves its databases with pg_upgrade to a new server, of the binaries in bin, or of the same
// ones. The new server has a port of its own.
func (s *Server) Upgrade(tb testing.TB, bin string) *Server {
	tb.Helper()
	from, err := local.PostgresBin(tb.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	Must(tb, err)
	bin = cmp.Or(bin, from)
	program := filepath.Join(bin, "pg_upgrade")
	if _, err := os.Stat(program); err != nil {
		tb.Fatalf("%v: POSTHASTE_TEST_PG_BIN, or POSTHASTE_TEST_PG_UPGRADE, has to name a folder with all of "+
			"Postgres' programs", err)
	}
	dir := folder(tb, "pg")
	pg, err := local.StartPostgres(tb.Context(), bin, dir, fast...)
	Must(tb, err)
	Must(tb, asSince15(tb.Context(), pg))
	// The moved roles have the old server's password, and pg_upgrade connects before and after moving them.
	err = execOn(tb.Context(), pg.URL("postgres"), "ALTER ROLE postgres PASSWORD '"+s.Password+"'")
	Must(tb, errors.Join(err, pg.Stop("fast"), s.Stop("fast")))
	pg.Password = s.Password
	data := filepath.Join(dir, "data")
	info, err := os.Stat(data)
	Must(tb, err)
	const logical = "-c wal_level=logical -c max_replication_slots=60 -c max_wal_senders=60"
	cmd := exec.CommandContext(tb.Context(), program, "-U", "postgres",
		"-b", from, "-d", filepath.Join(s.Dir, "data"), "-p", strconv.Itoa(s.Port), "-o", logical,
		"-B", bin, "-D", data, "-P", strconv.Itoa(pg.Port), "-O", logical)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PGPASSWORD="+s.Password)
	if os.Geteuid() == 0 { // Postgres refuses to run as root
		owner := info.Sys().(*syscall.Stat_t)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("pg_upgrade: %v: %s", err, out)
	}
	Must(tb, pg.Start(tb.Context()))
	tb.Cleanup(func() { _ = pg.Stop("immediate") })
	return &Server{pg}
}

// template has the files of a server that has never run.
var template = sync.OnceValues(func() (*local.Postgres, error) {
	ctx := context.Background()
	bin, err := local.PostgresBin(ctx, os.Getenv("POSTHASTE_TEST_PG_BIN"))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(home, "initdb-")
	if err != nil {
		return nil, err
	}
	return local.InitPostgres(ctx, bin, dir, fast...)
})

// startPostgres starts a server on a copy of files that initdb makes once for a test binary. That takes an eighth of
// initdb's processor time.
func startPostgres(dir string, settings ...string) (*local.Postgres, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	files, err := template()
	if err != nil {
		return nil, err
	}
	pg, err := files.Clone(ctx, dir)
	if err == nil {
		err = renumber(filepath.Join(dir, "data"))
	}
	if err == nil {
		err = pg.Start(ctx, settings...)
	}
	if err != nil {
		return nil, err
	}
	return pg, asSince15(ctx, pg)
}

// renumber gives the files of a server that has never run another system identifier: in the control file, which ends
// with a checksum, and at the beginning of the WAL.
func renumber(data string) error {
	control := filepath.Join(data, "global", "pg_control")
	b, err := os.ReadFile(control)
	if err != nil {
		return err
	}
	id := binary.NativeEndian.AppendUint64(nil, mrand.Uint64()>>1)
	checksum := func(n int) uint32 { return crc32.Checksum(b[:n], crc32.MakeTable(crc32.Castagnoli)) }
	end := 200
	for checksum(end) != binary.NativeEndian.Uint32(b[end:]) {
		if end += 4; end > 500 {
			return errors.New("no checksum in pg_control")
		}
	}
	copy(b, id)
	binary.NativeEndian.PutUint32(b[end:], checksum(end))
	if err := os.WriteFile(control, b, 0o600); err != nil {
		return err
	}
	segments, err := filepath.Glob(filepath.Join(data, "pg_wal", "0*"))
	for _, segment := range segments {
		f, ferr := os.OpenFile(segment, os.O_WRONLY, 0)
		if ferr == nil {
			_, werr := f.WriteAt(id, 24)
			ferr = errors.Join(werr, f.Close())
		}
		err = errors.Join(err, ferr)
	}
	return err
}

// asSince15 sets the default since Postgres 15.
func asSince15(ctx context.Context, pg *local.Postgres) error {
	err := execOn(ctx, pg.URL("template1"), "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	if err != nil {
		_ = pg.Stop("immediate")
	}
	return err
}

// shared is the server of all tests of this process, once it runs.
var shared *local.Postgres

// startShared starts the shared server, once, and makes the template of its databases.
var startShared = sync.OnceValue(func() error {
	dir, err := os.MkdirTemp(home, "pg-")
	if err != nil {
		return err
	}
	if shared, err = startPostgres(dir); err != nil {
		return err
	}
	ctx := context.Background()
	if err := execOn(ctx, shared.URL("postgres"), "CREATE DATABASE posthaste_template"); err != nil {
		return err
	}
	_, err = sql.Migrate(ctx, shared.URL("posthaste_template"), "public", slog.New(slog.DiscardHandler))
	return err
})

func sharedServer(tb testing.TB) *local.Postgres {
	tb.Helper()
	if err := startShared(); err != nil {
		tb.Fatalf("postgres: %v", err)
	}
	return shared
}

func execOn(ctx context.Context, url, stmt string) error {
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	_, err = c.Exec(ctx, stmt)
	return err
}

// Database is a migrated database of one test.
type Database struct {
	// URL is the DSN as the superuser.
	URL string
	// Name is the database's name.
	Name string
	// Relay is a relay name that no other test uses.
	Relay string
	// Pool connects to it; it is closed when the test ends.
	Pool *pgxpool.Pool
}

// Postgres returns a new migrated database on the binary's shared server.
func Postgres(tb testing.TB) *Database {
	tb.Helper()
	return newDatabase(tb, sharedServer(tb), "posthaste_template")
}

// Empty returns a new database without posthaste's tables on the binary's shared server.
func Empty(tb testing.TB) *Database {
	tb.Helper()
	return newDatabase(tb, sharedServer(tb), "template1")
}

// Encoded returns a new migrated database in another encoding on the binary's shared server.
func Encoded(tb testing.TB, encoding string) *Database {
	tb.Helper()
	d := newDatabase(tb, sharedServer(tb), "template0 LC_COLLATE 'C' LC_CTYPE 'C' ENCODING '"+encoding+"'")
	d.migrate(tb)
	return d
}

// Empty returns a new database without posthaste's tables on the test's own server.
func (s *Server) Empty(tb testing.TB) *Database {
	tb.Helper()
	return newDatabase(tb, s.Postgres, "template1")
}

// Database returns a new migrated database on the test's own server.
func (s *Server) Database(tb testing.TB) *Database {
	tb.Helper()
	d := s.Empty(tb)
	d.migrate(tb)
	return d
}

func (d *Database) migrate(tb testing.TB) {
	tb.Helper()
	_, err := sql.Migrate(tb.Context(), d.URL, "public", slog.New(slog.DiscardHandler))
	Must(tb, err)
}

func newDatabase(tb testing.TB, pg *local.Postgres, template string) *Database {
	tb.Helper()
	n := counter.Add(1)
	d := &Database{Name: fmt.Sprintf("t%d", n), Relay: fmt.Sprintf("t%d_%d", os.Getpid(), n)}
	d.URL = pg.URL(d.Name)
	Must(tb, execOn(tb.Context(), pg.URL("postgres"), "CREATE DATABASE "+d.Name+" TEMPLATE "+template))
	var err error
	d.Pool, err = pgxpool.New(tb.Context(), d.URL)
	Must(tb, err)
	tb.Cleanup(func() { d.cleanup(pg) })
	return d
}

// cleanup drops the database, and the test's slot, which would otherwise hold WAL of the shared server.
func (d *Database) cleanup(pg *local.Postgres) {
	d.Pool.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if c, err := pgx.Connect(ctx, pg.URL("postgres")); err == nil { // the server may be down
		_, _ = c.Exec(ctx, "SET synchronous_commit = off") // commits may wait for a standby that does not exist
		_ = local.DropDatabase(ctx, c, d.Name)
		_ = c.Close(ctx)
	}
}

// Login is the clause of CREATE ROLE that lets As connect to the server of a DSN.
func Login(dsn string) string {
	return "LOGIN PASSWORD '" + Password(dsn) + "'"
}

// Password returns the password of a DSN.
func Password(dsn string) string {
	password, _ := parse(dsn).User.Password()
	return password
}

// As returns a DSN for another role; see Login.
func As(dsn, role string) string {
	u := parse(dsn)
	u.User = url.UserPassword(role, Password(dsn))
	return u.String()
}

// Through returns a DSN with another address, such as a proxy's.
func Through(dsn, addr string) string {
	u := parse(dsn)
	u.Host = addr
	return u.String()
}

func parse(dsn string) *url.URL {
	u, err := url.Parse(dsn)
	if err != nil {
		panic(err) // the error quotes only a test server's password
	}
	return u
}

// Strand makes a session that is no relay's hold the leader's lock until the test ends.
func (d *Database) Strand(tb testing.TB) {
	tb.Helper()
	c, err := d.Pool.Acquire(tb.Context())
	Must(tb, err)
	session := c.Hijack()
	tb.Cleanup(func() { _ = session.Close(context.Background()) })
	const lead = "SELECT pg_advisory_lock(hashtextextended('posthaste leader ' || 'outbox'::regclass::oid::text, 0))"
	_, err = session.Exec(tb.Context(), lead)
	Must(tb, err)
}

// Exec runs a statement and fails the test on an error.
func (d *Database) Exec(tb testing.TB, stmt string, args ...any) {
	tb.Helper()
	if _, err := d.Pool.Exec(tb.Context(), stmt, args...); err != nil {
		tb.Fatalf("%s: %v", firstLine(stmt), err)
	}
}

// Value runs a query for one value.
func Value[T any](tb testing.TB, d *Database, query string, args ...any) T {
	tb.Helper()
	var v T
	if err := d.Pool.QueryRow(tb.Context(), query, args...).Scan(&v); err != nil {
		tb.Fatalf("%s: %v", firstLine(query), err)
	}
	return v
}

// PrepareAll prepares every file of dir, one statement each, which fails if one names a missing column.
func (d *Database) PrepareAll(tb testing.TB, dir string) {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.sql"))
	if err != nil || len(files) == 0 {
		tb.Fatalf("no query files: %v", err)
	}
	conn, err := pgx.Connect(tb.Context(), d.URL)
	Must(tb, err)
	defer func() { _ = conn.Close(context.WithoutCancel(tb.Context())) }()
	for _, f := range files {
		text, err := os.ReadFile(f)
		Must(tb, err)
		if _, err := conn.Prepare(tb.Context(), f, string(text)); err != nil {
			tb.Errorf("%s: %v", f, err)
		}
	}
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}

// RedisServer is a Redis server of one test.
type RedisServer struct {
	*local.Redis
	// Client connects to it; it is closed when the test ends.
	Client *redis.Client
}

// Restart kills the server and restarts it with its data on disk.
func (r *RedisServer) Restart(tb testing.TB) {
	tb.Helper()
	Must(tb, r.Kill())
	Must(tb, r.Start(tb.Context()))
}

// kept makes a Redis lose nothing when a test kills it: the kernel has its writes before it answers. With everysec it
// delays writes during an fsync, but still answers. The machine never crashes.
const kept = "appendfsync no"

// Redis starts a server for this test. Config lines are those of redis.conf.
func Redis(tb testing.TB, config ...string) *RedisServer {
	tb.Helper()
	return redisWith(tb, redisBin(tb), nil, append([]string{kept}, config...)...)
}

// RedisTLS starts a server that accepts TLS only, with a certificate of ca, and requires a client certificate of ca.
func RedisTLS(tb testing.TB, ca *CA, change ...func(c *x509.Certificate)) *RedisServer {
	tb.Helper()
	bin := redisBin(tb)
	cert, key, caFile := ca.Files(tb, tb.TempDir(), change...)
	// This client does not verify the server.
	client := &tls.Config{Certificates: []tls.Certificate{ca.Pair(tb)}, InsecureSkipVerify: true}
	return redisWith(tb, bin, client, kept, "tls-cert-file "+cert, "tls-key-file "+key, "tls-ca-cert-file "+caFile,
		"tls-auth-clients yes")
}

// Valkey starts a server with WAITAOF that syncs every second: POSTHASTE_TEST_VALKEY_BIN or valkey-server in PATH.
func Valkey(tb testing.TB, config ...string) *RedisServer {
	tb.Helper()
	return redisWith(tb, valkeyBin(tb), nil, config...)
}

func valkeyBin(tb testing.TB) string {
	tb.Helper()
	bin, err := local.RedisBin(cmp.Or(os.Getenv("POSTHASTE_TEST_VALKEY_BIN"), "valkey-server"))
	if err != nil {
		tb.Fatalf("%v; scripts/ensure.sh valkey installs it", err)
	}
	return bin
}

func redisWith(tb testing.TB, bin string, client *tls.Config, config ...string) *RedisServer {
	tb.Helper()
	r, err := local.StartRedisTLS(tb.Context(), bin, folder(tb, "redis"), client, config...)
	Must(tb, err)
	tb.Cleanup(func() { _ = r.Kill() })
	c := redis.NewClient(&redis.Options{Addr: r.Addr(), Protocol: 2, TLSConfig: client})
	tb.Cleanup(func() { _ = c.Close() })
	return &RedisServer{Redis: r, Client: c}
}

// Request sends an HTTP request.
var Request = local.Request

// Must ends the test if err is not nil.
func Must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// folder makes a folder that is removed when the test ends. Its path is short, and another user may be given it.
func folder(tb testing.TB, name string) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "posthaste-"+name+"-")
	Must(tb, err)
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// redisBin returns the program of Redis.
func redisBin(tb testing.TB) string {
	tb.Helper()
	bin, err := local.RedisBin(os.Getenv("POSTHASTE_TEST_REDIS_BIN"))
	Must(tb, err)
	return bin
}

// FailIf returns an error if bad is true. It is for the conditions of Eventually.
func FailIf(bad bool, format string, a ...any) error {
	if bad {
		return fmt.Errorf(format, a...)
	}
	return nil
}

// patience is the factor for slow machines: some are slow for hours, which must not fail a test. A test that hangs
// fails anyway.
const patience = 3

// Eventually polls cond until it returns nil. It fails the test with cond's last error after patience times within,
// which is the limit on an idle machine. The interval grows from 10 to 100 ms, because most conditions query a server
// that is under test.
func Eventually(tb testing.TB, within time.Duration, cond func() error) {
	tb.Helper()
	within *= patience
	began := time.Now()
	for {
		err := cond()
		if err == nil {
			return
		}
		waited := time.Since(began)
		if waited > within {
			tb.Fatalf("not within %v: %v", within, err)
		}
		time.Sleep(min(max(waited/20, 10*time.Millisecond), 100*time.Millisecond))
	}
}

// Logger returns a logger that writes to the test's log.
func Logger(tb testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(logWriter{tb}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type logWriter struct{ tb testing.TB }

func (w logWriter) Write(b []byte) (int, error) {
	defer func() { _ = recover() }() // a goroutine may log after the test has ended
	w.tb.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

// Root returns the folder of go.mod.
func Root(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	Must(tb, err)
	for dir != "/" {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		dir = filepath.Dir(dir)
	}
	tb.Fatal("no go.mod above the test")
	return ""
}

// Standby sets the server's synchronous_standby_names: commits wait for a standby that does not exist or, with "",
// for none.
func (d *Database) Standby(tb testing.TB, name string) {
	tb.Helper()
	d.Exec(tb, "ALTER SYSTEM SET synchronous_standby_names = '"+name+"'")
	d.Exec(tb, "SELECT pg_reload_conf()")
}

// WaitHeld waits until a commit with synchronous replication is blocked: the server applies a change of
// synchronous_standby_names some time after the reload.
func (d *Database) WaitHeld(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	probe, err := pgx.Connect(ctx, d.URL)
	Must(tb, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() { _ = probe.Close(context.Background()) }()
		for err := error(nil); err == nil; {
			_, err = probe.Exec(ctx, "SET synchronous_commit = on; CREATE TABLE held_probe (); DROP TABLE held_probe")
		}
	}()
	defer func() { cancel(); <-ended }() // ends the probe's connection, which completes the commit that it waits for
	Eventually(tb, 30*time.Second, func() error {
		var waits bool
		err := d.Pool.QueryRow(ctx,
			"SELECT coalesce(wait_event = 'SyncRep', false) FROM pg_stat_activity WHERE pid = $1",
			probe.PgConn().PID()).Scan(&waits)
		if err != nil || !waits {
			return fmt.Errorf("commits are not held back, %w", err)
		}
		return nil
	})
}
