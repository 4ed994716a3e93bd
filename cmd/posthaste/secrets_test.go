package main

import (
	"cmp"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// Every command warns in its log about a secret on the command line, without showing the secret.
func TestASecretAmongTheFlagsIsWarnedAbout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		flag  string
		lines int
	}{
		{"--admin-token=" + secret, 1},
		{"--redis-url=redis://:" + secret + "@127.0.0.1", 1},
		{"--redis-url=redis://127.0.0.1", 0},
	} {
		r := runToEnd(t, "version", "--log-format=json", c.flag)
		warned := strings.Count(r.errOut, `"level":"WARN"`)
		if r.code != 0 || warned != c.lines || strings.Count(r.errOut, "\n") != c.lines ||
			strings.Contains(r.errOut, secret) {
			t.Errorf("%s: exit %d, %q", c.flag, r.code, r.errOut)
		}
	}
}

// rotation is a world whose processes log in with passwords from files.
type rotation struct {
	*world
	role, postgres, redisFile string
	n                         int
}

func newRotation(t *testing.T) *rotation {
	t.Helper()
	w := newWorld(t)
	r := &rotation{world: w, role: "rotated_" + w.db.Relay}
	w.db.Exec(t, "CREATE ROLE "+r.role+" SUPERUSER LOGIN") // a role of the server, which ends with the tests
	dir := t.TempDir()
	r.postgres, r.redisFile = filepath.Join(dir, "postgres"), filepath.Join(dir, "redis")
	u, err := url.Parse(w.pgURL)
	must(t, err)
	u.User = url.User(r.role)
	w.pgURL, w.rdURL = u.String(), "redis://app@"+w.redis.Addr()
	w.env = []string{
		"POSTHASTE_POSTGRES_PASSWORD_FILE=" + r.postgres, "POSTHASTE_REDIS_PASSWORD_FILE=" + r.redisFile,
	}
	r.files()
	r.servers()
	return r
}

// password is the current one.
func (r *rotation) password() string { return secret + strconv.Itoa(r.n) }

func (r *rotation) files() {
	for _, path := range []string{r.postgres, r.redisFile} {
		must(r.t, os.WriteFile(path, []byte(r.password()+"\n"), 0o600))
	}
}

func (r *rotation) servers() {
	r.db.Exec(r.t, "ALTER ROLE "+r.role+" PASSWORD '"+r.password()+"'")
	must(r.t, r.redis.Client.Do(r.t.Context(), "ACL", "SETUSER", "app", "on", "resetpass", ">"+r.password(), "~*", "&*",
		"+@all").Err())
}

// cut ends the connections of the processes.
func (r *rotation) cut() {
	r.db.Exec(r.t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", r.role)
	must(r.t, r.redis.Client.Do(r.t.Context(), "CLIENT", "KILL", "USER", "app").Err())
}

// Passwords change at the servers and in their files, in either order, while every kind of process runs. A refused
// password is named by its setting and never shown. The processes recover without a restart, and lose nothing.
func TestPasswordsChange(t *testing.T) {
	t.Parallel()
	inMode(t, "cdc", func(t *testing.T, mode string) {
		r := newRotation(t)
		relay := r.relayIn(mode)
		api := r.spawn("serve")
		api.waitReady("")
		consumer := r.fork("", r.env, "consume", "--group=g", "--admin-addr=")
		load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Rate: 200, Types: []string{"invoice"}})
		for _, first := range []func(){r.files, r.servers} {
			r.n++
			first()
			for _, p := range []*child{relay, api} {
				for _, setting := range []string{"POSTHASTE_POSTGRES_PASSWORD_FILE", "POSTHASTE_REDIS_PASSWORD_FILE"} {
					testenv.Eventually(t, 30*time.Second, func() error {
						r.cut() // also the connections that were being made when the password changed
						var h readiness
						status, err := p.get("/readyz", &h)
						texts := strings.Join(slices.Concat(h.Reasons, h.Degraded, h.Remedy), "\n")
						return testenv.FailIf(err != nil || status != http.StatusServiceUnavailable ||
							!strings.Contains(texts, setting),
							"%d %+v, %v", status, h, err)
					})
				}
			}
			consumer.waitLogged("POSTHASTE_REDIS_PASSWORD_FILE")
			r.once("status").oneLine(t, 1, "POSTHASTE_POSTGRES_PASSWORD_FILE is read again")
			r.files()
			r.servers()
			relay.becomes("leader")
			api.waitReady("")
			if a, err := placeOrder(t.Context(), api.http, 5); err != nil || a.status != http.StatusCreated {
				t.Errorf("order: status %d, %v", a.status, err)
			}
		}
		r.waitMode(mode)
		r.ended(load)
		testenv.Eventually(t, 30*time.Second, func() error {
			n := strings.Count(consumer.output(), `"entry_id":`)
			return testenv.FailIf(n < load.Committed()+2, "consumed %d events of %d", n, load.Committed()+2)
		})
		hides(t, secret, relay.output(), api.output(), consumer.output())
		for name, p := range map[string]*child{"relay": relay, "serve": api} {
			if !p.logged("POSTHASTE_POSTGRES_PASSWORD_FILE is read again") {
				t.Errorf("the log of %s does not name the setting", name)
			}
		}
	})
}

// A file with an address gives the user and the password of each connection. Its host is that of the start.
func TestAddressesOfFilesChange(t *testing.T) {
	t.Parallel()
	r := newRotation(t)
	as := func(role, host string) {
		u, err := url.Parse(r.db.URL)
		must(t, err)
		u.User = url.UserPassword(role, r.password())
		u.Host = cmp.Or(host, u.Host)
		must(t, os.WriteFile(r.postgres, []byte(u.String()), 0o600))
		must(t, os.WriteFile(r.redisFile, []byte("redis://app:"+r.password()+"@"+cmp.Or(host, r.redis.Addr())), 0o600))
	}
	as(r.role, "")
	r.env = []string{"POSTHASTE_POSTGRES_URL_FILE=" + r.postgres, "POSTHASTE_REDIS_URL_FILE=" + r.redisFile}
	r.pgURL, r.rdURL = "", ""
	relay := r.relayIn("cdc")
	r.n++
	r.servers()
	r.db.Exec(t, "CREATE ROLE "+r.role+"_2 SUPERUSER LOGIN PASSWORD '"+r.password()+"'")
	r.cut()
	relay.waitUnready("POSTHASTE_POSTGRES_URL_FILE")
	as(r.role+"_2", "127.0.0.1:1")
	relay.becomes("leader")
	r.delivers()
}
