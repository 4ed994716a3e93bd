package main

import (
	"context"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
)

// mistake is a command that fails because of one mistake of its user.
type mistake struct {
	name string
	// args are separated by spaces: variables of the environment, the command, and flags that beat those of the world.
	args string
	code int
	// line has the texts that the one line must contain, separated by " | ": the problem, its place, and the remedy. A
	// doctor's line is that of a finding.
	line string
}

// mistakes has the servers that the mistakes are made with.
type mistakes struct {
	t *testing.T
	*world

	// dir has files, host and redisAt are the addresses of the world's servers.
	dir, host, redisAt string
	ca, stranger       *testenv.CA
}

// noise are texts of libraries that say nothing to a user.
var noise = regexp.MustCompile(`dial tcp|dial error|dial unix|failed to |SQLSTATE|server error|read tcp|lookup |` +
	`connect: |context deadline|context canceled|x509: |tls: |syscall|<nil>|%!|&\{|\bEOF\b|goroutine|\.go:|WRONGPASS|` +
	`NOAUTH|strconv|^posthaste: [^:]*posthaste: `)

// clause is a part of a line between punctuation.
var clause = regexp.MustCompile(`[^:;,()]+`)

// TestMistakes makes the most likely mistakes of users, operators and developers. Each gives one line with the problem,
// its place and the remedy.
func TestMistakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := &mistakes{t: t, world: w, dir: t.TempDir(), ca: testenv.NewCA(t), stranger: testenv.NewCA(t)}
	m.host, m.redisAt = hostOf(t, w.pgURL), w.redis.Addr()
	for _, rows := range [][]mistake{
		m.ofPostgres(), m.ofRights(), m.ofSchemas(), m.ofDoctor(), m.ofRedis(), m.ofRedisTLS(), m.ofSettings(),
		m.ofFiles(), m.ofCommands(),
	} {
		for _, c := range rows {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				m.make(t, c)
			})
		}
	}
}

// make makes a mistake and checks its line.
func (m *mistakes) make(t *testing.T, c mistake) {
	t.Helper()
	args := strings.Fields(c.args)
	env := args[:slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "POSTHASTE_") })]
	args = args[len(env):]
	n := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") })
	if n < 0 {
		n = len(args)
	}
	all := args
	if n > 0 && c.name != "an unknown command" && c.name != "a misspelt command" {
		all = slices.Concat(args[:n], m.args("--log-level=error"), args[n:])
	}
	var r result
	if len(env) > 0 {
		all = slices.DeleteFunc(all, func(a string) bool {
			return strings.Contains(c.args, "_FILE=") && strings.Contains(a, "-url=")
		})
		r = runAs(t, env, all...)
	} else {
		r = runHere(t, all...)
	}
	texts := strings.Split(c.line, " | ")
	line := regexp.MustCompile(`(?m)^\{.*\n`).ReplaceAllString(r.errOut, "") // without the log
	if args[0] == "doctor" {
		joined := regexp.MustCompile(`\n +-> `).ReplaceAllString(r.out, " -> ")
		for found := range strings.Lines(joined) {
			if strings.Contains(found, texts[0]) {
				line += found
			}
		}
	}
	t.Logf("%s: %d %s", c.name, r.code, line)
	if r.code != c.code || strings.Count(line, "\n") != 1 {
		t.Errorf("exit %d and %q, want exit %d and one line", r.code, line, c.code)
	}
	for _, text := range texts {
		if !strings.Contains(line, text) && !strings.Contains(r.errOut, text) {
			t.Errorf("no %q in %q", text, line)
		}
	}
	if found := noise.FindString(line); found != "" {
		t.Errorf("noise %q in %q", found, line)
	}
	seen := map[string]bool{}
	for _, part := range clause.FindAllString(line, -1) {
		part = strings.TrimSpace(part)
		if seen[part] && len(part) > 3 && !strings.Contains(part, "//") && part != "host" {
			t.Errorf("%q twice in %q", part, line)
		}
		seen[part] = true
	}
	for _, hidden := range []string{testenv.Password(m.db.URL), secret} {
		if strings.Contains(r.out+r.errOut, hidden) {
			t.Errorf("a secret in %q", r.out+r.errOut)
		}
	}
}

// on returns a command with another URL of Postgres.
func on(command, url string) string { return command + " --postgres-url=" + url }

// redisOn returns a command with another URL of Redis.
func redisOn(command, url string) string { return command + " --redis-url=" + url }

// roleWith creates a role that may log in, with statements whose $1 is its name, and returns the URL for it.
func (m *mistakes) roleWith(name string, statements ...string) string {
	m.t.Helper()
	name += "_" + m.db.Relay
	m.db.Exec(m.t, "CREATE ROLE "+name+" "+testenv.Login(m.db.URL))
	m.t.Cleanup(func() { // the test's context has ended
		_, _ = m.db.Pool.Exec(context.Background(), "DROP OWNED BY "+name)
		_, _ = m.db.Pool.Exec(context.Background(), "DROP ROLE "+name)
	})
	for _, s := range statements {
		m.db.Exec(m.t, strings.ReplaceAll(s, "$1", name))
	}
	return testenv.As(m.db.URL, name)
}

// deaf returns the address of a server that accepts connections and never answers.
func (m *mistakes) deaf() string {
	m.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(m.t.Context(), "tcp", "127.0.0.1:0")
	must(m.t, err)
	m.t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

func (m *mistakes) with(change func(u *url.URL)) string {
	u, err := url.Parse(m.db.URL)
	must(m.t, err)
	change(u)
	return u.String()
}

func (m *mistakes) ofPostgres() []mistake {
	wrong := m.with(func(u *url.URL) { u.User = url.UserPassword("postgres", secret) })
	none := m.with(func(u *url.URL) { u.User = url.User("postgres") })
	unknown := m.with(func(u *url.URL) { u.Path = "/nosuch" })
	tls := strings.Replace(m.db.URL, "sslmode=disable", "sslmode=require", 1)
	ca := strings.Replace(m.db.URL, "sslmode=disable", "sslmode=verify-full&sslrootcert=/nosuch.crt", 1)
	barred := m.roleWith("barred", "ALTER ROLE $1 NOLOGIN")
	full := m.roleWith("full", "ALTER ROLE $1 CONNECTION LIMIT 0")
	set := " | POSTHASTE_POSTGRES_URL"
	return []mistake{
		{"wrong password", on("status", wrong), 1, `wrong password for user "postgres" at ` + m.host + set},
		{"no password", on("mode", none), 1, `password for user "postgres" at ` + m.host + set},
		{"role may not log in", on("dead list", barred), 1, "barred_ | at " + m.host + " | LOGIN"},
		{
			"unknown database", on("status", unknown), 1,
			`database "nosuch" does not exist at ` + m.host + " | create the database" + set,
		},
		{
			"unknown host", on("audit", testenv.Through(m.db.URL, "nosuch.invalid:5432")), 1,
			"nosuch.invalid:5432 cannot be found" + set,
		},
		{
			"Postgres is down", on("migrate", testenv.Through(m.db.URL, "127.0.0.1:1")), 1,
			"127.0.0.1:1 refuses the connection | POSTHASTE_POSTGRES_URL",
		},
		{
			"Postgres does not answer", on("status", testenv.Through(m.db.URL, m.deaf())+"&connect_timeout=1"), 1,
			"does not answer in time | POSTHASTE_POSTGRES_URL",
		},
		{
			"the port of Redis", on("status", testenv.Through(m.db.URL, m.redisAt)), 1,
			m.redisAt + " | check that Postgres listens there",
		},
		{"TLS is not offered", on("status", tls), 1, m.host + " offers no TLS | sslmode in POSTHASTE_POSTGRES_URL"},
		{"the CA of Postgres is missing", on("status", ca), 2, "/nosuch.crt | --postgres-url"},
		{"too many connections", on("status", full), 1, "too many connections | max_connections"},
		{"another database's URL", on("status", "mysql://root:"+secret+"@h/db"), 2, "--postgres-url | postgres://"},
		{
			"a password that is not encoded", on("status", "postgres://u:"+secret+"%zz@h/db"), 2,
			"--postgres-url | percent-encoded",
		},
		{"an unknown sslmode", on("status", "postgres://u:"+secret+"@h/db?sslmode=on"), 2, "--postgres-url | sslmode"},
	}
}

func (m *mistakes) ofRights() []mistake {
	usage := m.roleWith("usage", "REVOKE USAGE ON SCHEMA public FROM PUBLIC")
	read := m.roleWith("read", "GRANT USAGE ON SCHEMA public TO $1")
	m.db.Exec(m.t, "CREATE SCHEMA own")
	create := m.roleWith("create", "GRANT USAGE ON SCHEMA own TO $1")
	foreign := testenv.Postgres(m.t)
	foreign.Exec(m.t, "ALTER DATABASE "+foreign.Name+" SET default_transaction_read_only = on")
	return []mistake{
		{"no USAGE on the schema", on("status", usage), 1, "--schema=public | GRANT USAGE ON SCHEMA"},
		{"no SELECT on a table", on("status", read), 1, "permission denied for | GRANT"},
		{"migrate without CREATE", on("migrate --schema=own", create), 1, "permission denied for schema own | GRANT"},
		{"migrate into a new schema", on("migrate --schema=fresh", create), 1, `create schema "fresh" | GRANT`},
		{"a read-only database", on("mode poll", foreign.URL), 1, "read-only | --postgres-url at the primary"},
	}
}

func (m *mistakes) ofSchemas() []mistake {
	empty, older, newer := testenv.Empty(m.t), testenv.Postgres(m.t), testenv.Postgres(m.t)
	older.Exec(m.t, "DELETE FROM posthaste_migrations WHERE line = 'outbox'")
	newer.Exec(m.t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 999)")
	return []mistake{
		{"not migrated", on("status", empty.URL), 1, empty.Name + " | run posthaste migrate"},
		{"another schema", "status --schema=nosuch", 1, "--schema=nosuch | run posthaste migrate"},
		{"an older schema", on("dead list", older.URL), 1, older.Name + " | run posthaste migrate"},
		{"a newer schema", on("status", newer.URL), 1, "newer than this binary | run the newer posthaste"},
	}
}

// ofDoctor has what the doctor finds before a relay starts.
func (m *mistakes) ofDoctor() []mistake {
	s := testenv.NewServer(m.t, "wal_level=replica", "max_wal_senders=0", "max_replication_slots=0")
	db := s.Database(m.t)
	m.withTLS(s)
	tls := func(parameters string) string {
		testenv.Eventually(m.t, 20*time.Second, func() error {
			on := testenv.Value[string](m.t, db, "SHOW ssl")
			return testenv.FailIf(on != "on", "ssl is %s", on)
		})
		return strings.Replace(db.URL, "sslmode=disable", "sslmode=verify-full&"+parameters, 1)
	}
	stranger := testenv.WriteFile(m.t, m.dir, "stranger.crt", m.stranger.PEM)
	ca := testenv.WriteFile(m.t, m.dir, "pg-ca.crt", m.ca.PEM)
	localhost := strings.Replace(hostOf(m.t, db.URL), "127.0.0.1", "localhost", 1)
	relay := m.roleWith("relay", "GRANT USAGE ON SCHEMA public TO $1",
		"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO $1")
	return []mistake{
		{"wal_level", on("doctor", db.URL), 1, "fail  wal_level | -> ALTER SYSTEM SET wal_level = logical"},
		{
			"no free slot", on("doctor", db.URL), 1,
			"fail  max_replication_slots | no slot is free | -> drop a slot that is not used",
		},
		{
			"no free walsender", on("doctor", db.URL), 1,
			"fail  max_wal_senders | no walsender is free | -> raise max_wal_senders",
		},
		{"no REPLICATION", on("doctor", relay), 1, "fail  replication right | -> ALTER ROLE | REPLICATION"},
		{
			"cdc through a pooler", on("doctor", testenv.PgBouncer(m.t, m.db.URL, "transaction")), 1,
			"fail  pooler | direct",
		},
		{"the doctor's password", on("doctor", m.with(func(u *url.URL) {
			u.User = url.UserPassword("postgres", secret)
		})), 1, `fail  postgres  | wrong password for user "postgres" | POSTHASTE_POSTGRES_URL`},
		{
			"Postgres' certificate is of another CA", on("status", tls("sslrootcert="+stranger)), 1,
			"certificate | sslrootcert",
		},
		{
			"Postgres' certificate is of another host",
			on("status", testenv.Through(tls("sslrootcert="+ca), localhost)), 1,
			"certificate | localhost",
		},
	}
}

// withTLS makes a server offer TLS, with a certificate for another host.
func (m *mistakes) withTLS(s *testenv.Server) {
	cert, key, _ := m.ca.Files(m.t, s.Dir, testenv.Elsewhere)
	info, err := os.Stat(filepath.Join(s.Dir, "data"))
	must(m.t, err)
	owner := info.Sys().(*syscall.Stat_t)
	db := s.Empty(m.t)
	for _, file := range []string{cert, key} {
		must(m.t, os.Chown(file, int(owner.Uid), int(owner.Gid)))
	}
	db.Exec(m.t, "ALTER SYSTEM SET ssl_cert_file = '"+cert+"'")
	db.Exec(m.t, "ALTER SYSTEM SET ssl_key_file = '"+key+"'")
	db.Exec(m.t, "ALTER SYSTEM SET ssl = on")
	db.Exec(m.t, "SELECT pg_reload_conf()")
}

func (m *mistakes) ofRedis() []mistake {
	locked := testenv.Redis(m.t, "user weak on >secret ~* +@read -info", "maxmemory 100kb").Addr()
	closed := testenv.Redis(m.t, "user default on >"+secret+"1 ~* +@all", "user weak on >"+secret+" ~* -@all").Addr()
	replica := testenv.Redis(m.t, "replicaof 127.0.0.1 1").Addr()
	node := testenv.Redis(m.t, "cluster-enabled yes").Addr()
	sentinel := testenv.SentinelOf(m.t, local.SentinelOptions{Sentinels: 1})
	watch := sentinel.Sentinels[0].Addr()
	do(m.t, m.redis.Client, "set", "outbox.text", "x")
	evicts := testenv.Redis(m.t, "maxmemory-policy allkeys-lru").Addr()
	set := " | POSTHASTE_REDIS_URL"
	return []mistake{
		{"keys may be evicted", redisOn("doctor", "redis://"+evicts), 0, "redis eviction | allkeys-lru | noeviction"},
		{"no password of Redis", redisOn("groups list", "redis://"+closed), 1, closed + " | password" + set},
		{
			"wrong password of Redis", redisOn("groups list", "redis://:"+secret+"x@"+closed), 1,
			closed + " | password" + set,
		},
		{"a user without rights", redisOn("groups list", "redis://weak:"+secret+"@"+closed), 1, closed + " | ACL"},
		{"a replica", redisOn("doctor", "redis://"+replica), 1, "fail  redis  | primary" + set},
		{"memory is full", redisOn("doctor", "redis://"+locked), 1, "fail  redis  | raise maxmemory"},
		{"Redis is down", redisOn("groups list", "redis://127.0.0.1:1"), 1, "127.0.0.1:1 refuses the connection" + set},
		{"unknown host of Redis", redisOn("groups list", "redis://nosuch.invalid"), 1, "nosuch.invalid" + set},
		{"Redis does not answer", redisOn("groups list", "redis://"+m.deaf()), 1, "does not answer in time" + set},
		{"the port of Postgres", redisOn("groups list", "redis://"+m.host), 1, m.host + set},
		{
			"a cluster's URL for one server", redisOn("groups list", "redis://"+m.redisAt+"?addr="+m.redisAt), 1,
			m.redisAt + " is not a cluster" + set,
		},
		{"a database of a cluster", redisOn("groups list", "redis://"+node+"/1"), 2, "Redis URL | database 0"},
		{"a Sentinel's port", redisOn("groups list", "redis://"+watch), 2, "Sentinel | master_name"},
		{
			"an unknown master", redisOn("groups list", "redis://"+watch+"?master_name=nosuch"), 1,
			watch + " | master_name" + set,
		},
		{"a scheme that is not Redis'", redisOn("groups list", "http://:"+secret+"@h"), 2, "--redis-url | redis://"},
		{"an unknown option", redisOn("groups list", "redis://:"+secret+"@h?nosuch=1"), 2, "--redis-url | options"},
		{
			"a key that is no stream", "streams drop --stream=outbox.text --yes", 1,
			"wrong kind | " + m.redisAt + " | rename or delete",
		},
	}
}

func (m *mistakes) ofRedisTLS() []mistake {
	r := testenv.RedisTLS(m.t, m.ca)
	elsewhere := testenv.RedisTLS(m.t, m.ca, testenv.Elsewhere)
	cert, key, ca := m.ca.Files(m.t, m.t.TempDir())
	own := " --redis-cert=" + cert + " --redis-key=" + key
	wrong := testenv.WriteFile(m.t, m.dir, "wrong.crt", m.stranger.PEM)
	empty := testenv.WriteFile(m.t, m.dir, "empty.crt", nil)
	list := func(addr string) string { return redisOn("groups list", "rediss://"+addr) }
	return []mistake{
		{"Redis offers no TLS", list(m.redisAt), 1, m.redisAt + " | no TLS | redis://"},
		{"Redis demands TLS", redisOn("groups list", "redis://"+r.Addr()), 1, r.Addr() + " | rediss://"},
		{
			"Redis' certificate is of another CA", list(r.Addr()) + " --redis-ca=" + wrong + own, 1,
			r.Addr() + " | certificate | --redis-ca",
		},
		{
			"Redis' certificate is of another host", list(elsewhere.Addr()) + " --redis-ca=" + ca + own, 1,
			elsewhere.Addr() + " | certificate",
		},
		{"no certificate for Redis", list(r.Addr()) + " --redis-ca=" + ca, 1, r.Addr() + " | : check"},
		{"the CA of Redis is missing", list(r.Addr()) + " --redis-ca=/nosuch.crt", 2, "--redis-ca | /nosuch.crt"},
		{"the CA of Redis is empty", list(r.Addr()) + " --redis-ca=" + empty, 2, "--redis-ca | empty.crt"},
	}
}

func (m *mistakes) ofSettings() []mistake {
	return []mistake{
		{
			"a misspelt setting",
			on("POSTHASTE_POSTGRE_URL=x status --log-level=warn", testenv.Through(m.db.URL, "127.0.0.1:1")), 1,
			"POSTHASTE_POSTGRE_URL | POSTHASTE_POSTGRES_URL",
		},
		{"a duration", "status --history=3days", 2, "--history | 3days | 72h"},
		{"a size", "status --wal-budget=huge", 2, "--wal-budget | huge | 64MiB"},
		{"on or off", "status --pubsub=yes", 2, "--pubsub | yes | on or off"},
		{"a choice", "status --poison=drop", 2, "--poison | drop | skip or block-key"},
		{"a number", "status --window=0", 2, "--window | 0 | from 1 to"},
		{"a level", "status --log-level=verbose", 2, "--log-level | verbose | debug, info, warn"},
		{"a schema", "status --schema=a-b", 2, "--schema | a-b | letters, digits or _"},
		{"a relay name", "status --relay-name=My-Relay", 2, "--relay-name | My-Relay | small letters"},
		{"an address", "serve --http-addr=8080", 2, "--http-addr | 8080 | host:port"},
		{"a port in use", "serve --http-addr=" + m.redisAt, 1, m.redisAt + " | in use | --http-addr"},
		{"the admin port in use", "relay --admin-addr=" + m.redisAt, 1, m.redisAt + " | in use | --admin-addr"},
		{"an open admin listener", "relay --admin-addr=0.0.0.0:0", 2, "--admin-addr | --admin-token"},
		{"a durability", "status --redis-durability=fsync", 2, "--redis-durability | fsync | aof"},
		{"keys without a file", "serve --auth=keys", 2, "--auth=keys needs --auth-keys-file"},
		{"a variable", "POSTHASTE_HISTORY=forever status", 2, "--history | forever | 72h"},
	}
}

func (m *mistakes) ofFiles() []mistake {
	empty := testenv.WriteFile(m.t, m.dir, "empty", nil)
	two := testenv.WriteFile(m.t, m.dir, "two", []byte(secret+"\n"+secret+"\n"))
	keys := testenv.WriteFile(m.t, m.dir, "keys", []byte(secret+"\n"))
	return []mistake{
		{
			"a URL file is missing", "POSTHASTE_POSTGRES_URL_FILE=/nosuch status", 2,
			"POSTHASTE_POSTGRES_URL_FILE | /nosuch",
		},
		{
			"a password file is empty", "POSTHASTE_REDIS_PASSWORD_FILE=" + empty + " status", 2,
			"POSTHASTE_REDIS_PASSWORD_FILE | empty",
		},
		{
			"a password file has two lines", "POSTHASTE_POSTGRES_PASSWORD_FILE=" + two + " status", 2,
			"POSTHASTE_POSTGRES_PASSWORD_FILE | one line",
		},
		{
			"a setting and its file",
			"POSTHASTE_ADMIN_TOKEN=" + secret + " POSTHASTE_ADMIN_TOKEN_FILE=" + two + " status", 2,
			"POSTHASTE_ADMIN_TOKEN_FILE | set one of them",
		},
		{"the keys are missing", "serve --auth=keys --auth-keys-file=/nosuch", 2, "--auth-keys-file | /nosuch"},
		{"the keys are damaged", "serve --auth=keys --auth-keys-file=" + keys, 2, "keys | line 1"},
		{"a certificate without a key", "serve --http-tls-cert=" + empty, 2, "--http-tls-cert | --http-tls-key"},
		{"no issuer", "serve --auth=jwt --jwt-audience=a --jwt-jwks=https://h/k", 2, "--auth=jwt needs --jwt-issuer"},
		{
			"the secret of deliver is missing", "deliver --group=g --to=http://127.0.0.1:1/ --secret-file=/nosuch", 2,
			"--secret-file | /nosuch",
		},
	}
}

func (m *mistakes) ofCommands() []mistake {
	id := "00000000-0000-7000-8000-000000000000"
	m.db.Exec(m.t, "CREATE TABLE old_outbox (id uuid PRIMARY KEY, body jsonb)")
	bridge := "bridge create --id=id --aggregate-type==a --aggregate-id=id --event-type==t --yes --payload="
	return []mistake{
		{"an unknown command", "nonsense", 2, "nonsense | posthaste --help"},
		{"a misspelt command", "statsu", 2, `statsu | "status"`},
		{"an unknown flag", "status --jsno", 2, "--jsno | --json"},
		{"a missing argument", "trace", 2, "<id> | --help"},
		{"a missing flag", "consume", 2, "--group | --help"},
		{"a bad id", "dead retry 123", 2, "123 | UUID"},
		{"an unknown event", "dead retry " + id, 1, id + " | dead list"},
		{"an unknown id", "trace " + id, 1, "never existed | expired | --user"},
		{"an unknown group", "groups drop --stream=outbox.order --group=nosuch --yes", 1, "there are: none"},
		{"an unknown stream", "streams drop --stream=nosuch --yes", 1, "nosuch | streams list"},
		{"no confirmation", "uninstall", 1, "--yes"},
		{"an unknown mode", "mode wal", 2, "wal | auto, cdc or poll"},
		{"a number of streams", "streams spread --per-type=3", 2, "--per-type | 3 | 16"},
		{"nothing chosen", "replay", 2, "--since | --all"},
		{"a time", "replay --since=yesterday", 2, "--since | yesterday | 90m"},
		{"an unknown table", bridge + "body --table=public.nosuch", 1, "nosuch"},
		{"an unknown column", bridge + "data --table=public.old_outbox", 1, "data | old_outbox"},
		{"a receiver that is no URL", "deliver --group=g --to=example.com", 2, "--to | https://"},
		{"an empty group", "consume --group=", 2, "--group"},
		{"an unknown shell", "completion csh", 2, "csh | bash"},
		{
			"nothing runs", "healthcheck --addr=127.0.0.1:1", 1,
			"127.0.0.1:1 | refuses the connection | start the process",
		},
	}
}
