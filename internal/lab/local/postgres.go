package local

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/pause"
)

// Postgres is a running server that this process owns.
type Postgres struct {
	// Dir holds the data directory.
	Dir string
	// Port is the TCP port on 127.0.0.1. It does not change over Stop and Start.
	Port int
	// Password is that of the superuser postgres.
	Password string
	*Process

	hold *os.File // of the port; released when the server is garbage-collected
	bin  string
	args []string
	cred *syscall.Credential
}

// ErrNoPostgres means that no server binaries were found.
var ErrNoPostgres = errors.New("no Postgres server binaries found; install them (Debian, Ubuntu: apt-get install " +
	"postgresql) or name their folder in POSTHASTE_PG_BIN")

// PostgresBin returns the folder of initdb and postgres: dir if not empty, else pg_config --bindir, the
// distribution's folders (newest first), PATH.
func PostgresBin(ctx context.Context, dir string) (string, error) {
	if dir != "" {
		if usable(dir) {
			return dir, nil
		}
		return "", fmt.Errorf("no initdb and postgres in %s", dir)
	}
	var dirs []string
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	sort.Slice(found, func(i, j int) bool { return pgVersion(found[i]) > pgVersion(found[j]) })
	dirs = append(dirs, found...)
	if p, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(p))
	}
	for _, d := range dirs {
		if usable(d) {
			return d, nil
		}
	}
	return "", ErrNoPostgres
}

func usable(dir string) bool {
	for _, name := range []string{"initdb", "postgres"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

func pgVersion(bin string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(bin)))
	return n
}

// StartPostgres makes a new cluster under dir and starts it. Each setting is "name=value".
func StartPostgres(ctx context.Context, bin, dir string, settings ...string) (*Postgres, error) {
	p, err := InitPostgres(ctx, bin, dir, settings...)
	if err != nil {
		return nil, err
	}
	return p, p.run(ctx)
}

// InitPostgres is StartPostgres without the start. Postgres refuses to run as root, so root runs it as the user
// postgres. Logical replication is on. It listens on loopback only, and requires a password from every user: a
// superuser of Postgres may run programs as the server's user.
func InitPostgres(ctx context.Context, bin, dir string, settings ...string) (*Postgres, error) {
	cred, err := serverUser(dir)
	if err != nil {
		return nil, err
	}
	p := &Postgres{Dir: dir, Password: rand.Text(), bin: bin, cred: cred}
	if err := p.init(ctx); err != nil {
		return nil, err
	}
	for _, s := range append([]string{
		// The path of a socket has at most about 100 bytes, and temporary folders may be deep.
		"listen_addresses=127.0.0.1", "unix_socket_directories=", "wal_level=logical",
		"max_connections=300", "max_replication_slots=60", "max_wal_senders=60", "logging_collector=off",
		"timezone=UTC",
	}, settings...) {
		p.args = append(p.args, "-c", s)
	}
	if p.Port, p.hold, err = ReservePort(); err != nil {
		return nil, err
	}
	return p, nil
}

// init makes the cluster. It passes the password in a file: every user can read a command line.
func (p *Postgres) init(ctx context.Context) error {
	file := filepath.Join(p.Dir, "password")
	verifier, err := verifierOf(p.Password)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(verifier), 0o600); err != nil {
		return fmt.Errorf("write the password: %w", err)
	}
	defer func() { _ = os.Remove(file) }()
	if p.cred != nil {
		if err := os.Chown(file, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
			return fmt.Errorf("give the password's file away: %w", err)
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "initdb"), "-D", filepath.Join(p.Dir, "data"),
		"-U", "postgres", "-A", "scram-sha-256", "--pwfile="+file, "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.cred}
	cmd.Dir = p.Dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	return nil
}

// verifierOf is the stored form of a password, with a single iteration. The usual 4,096 protect weak passwords, which
// this random one is not, and make each connection slower: by ten milliseconds with the race detector.
func verifierOf(password string) (string, error) {
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	salted, err := pbkdf2.Key(sha256.New, password, salt, 1, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("hash the password: %w", err)
	}
	sum := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		_, _ = h.Write([]byte(text)) // never fails
		return h.Sum(nil)
	}
	stored, encode := sha256.Sum256(sum("Client Key")), base64.StdEncoding.EncodeToString
	return "SCRAM-SHA-256$1:" + encode(salt) + "$" + encode(stored[:]) + ":" + encode(sum("Server Key")), nil
}

// Copy returns a server with a copy of p's data in dir, on its own port. It stops p during the copy, and does not
// start the copy.
func (p *Postgres) Copy(ctx context.Context, dir string) (*Postgres, error) {
	if err := p.Stop("fast"); err != nil {
		return nil, err
	}
	c, err := p.Clone(ctx, dir)
	if err != nil {
		return nil, err
	}
	return c, p.Start(ctx)
}

// Clone is Copy of a server that does not run.
func (p *Postgres) Clone(ctx context.Context, dir string) (*Postgres, error) {
	c := &Postgres{Dir: dir, Password: p.Password, bin: p.bin, cred: p.cred}
	for _, arg := range p.args {
		c.args = append(c.args, strings.Replace(arg, p.Dir, dir, 1))
	}
	if _, err := serverUser(dir); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", filepath.Join(p.Dir, "data"),
		dir).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("copy the data folder: %w: %s", err, out)
	}
	var err error
	if c.Port, c.hold, err = ReservePort(); err != nil {
		return nil, err
	}
	return c, nil
}

func serverUser(dir string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // no credential: run as this user
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		if err := os.Chown(dir, int(uid), int(gid)); err != nil {
			return nil, fmt.Errorf("give the data folder to %s: %w", name, err)
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("postgres refuses to run as root, and there is no user postgres or nobody")
}

func (p *Postgres) run(ctx context.Context) error {
	args := append([]string{"-D", filepath.Join(p.Dir, "data"), "-p", strconv.Itoa(p.Port)}, p.args...)
	cmd := exec.Command(filepath.Join(p.bin, "postgres"), args...) //nolint:noctx // lives until Stop
	proc, err := serve(cmd, p.Dir, syscall.SIGQUIT, p.cred)
	if err != nil {
		return err
	}
	p.Process = proc
	return p.await(ctx, p.ping)
}

func (p *Postgres) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := pgx.Connect(ctx, p.URL("postgres"))
	if err != nil {
		return err
	}
	return c.Close(ctx)
}

// Addr returns host:port.
func (p *Postgres) Addr() string { return fmt.Sprintf("127.0.0.1:%d", p.Port) }

// URL returns a database's URL for the superuser, over TCP, with the password.
func (p *Postgres) URL(database string) string {
	return fmt.Sprintf("postgres://postgres:%s@%s/%s?sslmode=disable", p.Password, p.Addr(), database)
}

// Stop ends the server in the given mode ("smart", "fast" or "immediate") and waits for it.
func (p *Postgres) Stop(mode string) error {
	sig, ok := map[string]os.Signal{
		"smart": syscall.SIGTERM, "fast": syscall.SIGINT, "immediate": syscall.SIGQUIT,
	}[mode]
	if !ok {
		return fmt.Errorf("unknown stop mode %q", mode)
	}
	return p.Process.Stop(sig, 30*time.Second)
}

// Start restarts a stopped server with the same port and data, and further settings.
func (p *Postgres) Start(ctx context.Context, settings ...string) error {
	for _, s := range settings {
		p.args = append(p.args, "-c", s)
	}
	return p.run(ctx)
}

// DropDatabase drops a database, and before it its slots, whose sessions it ends. db is connected to another database
// of the server.
func DropDatabase(
	ctx context.Context, db interface {
		Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error)
	}, name string,
) error {
	const of = " FROM pg_replication_slots WHERE database = $1"
	for {
		_, err := db.Exec(ctx, "SELECT pg_catalog.pg_terminate_backend(active_pid)"+of+" AND active", name)
		if err == nil {
			_, err = db.Exec(ctx, "SELECT pg_catalog.pg_drop_replication_slot(slot_name)"+of, name)
		}
		if err == nil {
			break
		}
		if pause.For(ctx, 20*time.Millisecond) != nil { // a session that is ended still has its slot
			return fmt.Errorf("drop the slots of %s: %w", name, err)
		}
	}
	_, err := db.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
	return err
}
