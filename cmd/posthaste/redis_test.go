package main

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/redisurl"
)

// worldAt returns a world with the Redis at a URL.
func worldAt(t *testing.T, url string, client redis.UniversalClient) *world {
	t.Helper()
	db := testenv.Postgres(t)
	return &world{
		t: t, db: db, pgURL: db.URL, rdURL: url,
		oracle: testenv.Oracle{DB: db, Redis: client, Prefix: "outbox."},
	}
}

// post repeats a request with the same key until it has the wanted status and Redis was the guard. Redis may fail to
// respond for half a second on a busy machine; a real fault shows in every attempt.
func (w *world) post(api *child, path, key, body string, want int) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		a, err := testenv.Request(w.t.Context(), http.MethodPost, api.http+path, body, "Idempotency-Key", key)
		if guard := a.Header.Get("Idempotency-Guard"); err == nil && (a.Status != want || guard == "db") {
			err = fmt.Errorf("POST %s: %d, guarded by %q\n%s", path, a.Status, guard, api.output())
		}
		return err
	})
}

// worksWith runs every process, and every command that talks to Redis, against the world's Redis.
func (w *world) worksWith(settings ...string) {
	t := w.t
	t.Helper()
	settings = append(settings, "--guard-redis-url="+w.rdURL, "--stream-maxlen=1000")
	relay, api := w.spawn("relay", settings...), w.spawn("serve", settings...)
	group := w.spawn("consume", append([]string{"--group=g"}, settings...)...)
	ordered := w.spawn("consume", append([]string{"--group=o", "--ordered"}, settings...)...)
	relay.waitReady("")
	types := []string{"a", "b", "c", "d", "e", "f"} // streams of several masters, and some of the same slot
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 300, Types: types})
	user := uuid.NewString()
	order := fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`, user)
	for key := range 8 { // the keys are also in several slots
		for range 2 { // Redis answers the second one
			w.post(api, "/orders", fmt.Sprintf("01900000-0000-7000-8000-00000000000%d", key), order, http.StatusCreated)
		}
	}
	var users []string
	for range 8 {
		user := uuid.NewString()
		users = append(users, user)
		w.post(api, "/add/"+user, uuid.NewString(), `{"amount":10}`, http.StatusOK)
		w.post(api, "/deduct/"+user, uuid.NewString(), `{"amount":3}`, http.StatusOK)
	}
	load.Wait()
	w.oracle.Check(t, load, 20*time.Second)
	for _, c := range []*child{group, ordered} {
		for _, want := range []string{"order.created", "credits.deducted", `"a.changed"`, `"f.changed"`} {
			c.waitLogged(want)
		}
	}
	event := testenv.Value[string](t, w.db, "SELECT id::text FROM outbox_history WHERE aggregate_type = 'c' LIMIT 1")
	each := func(commands ...string) {
		for _, command := range commands {
			testenv.Eventually(t, 10*time.Second, func() error { // on a busy machine, connecting may take a second
				r := w.once(append(strings.Fields(command), settings...)...)
				return testenv.FailIf(r.code != 0, "posthaste %s: exit %d: %s%s", command, r.code, r.out, r.errOut)
			})
		}
	}
	each("status", "doctor", "groups list", "dead list", "credits reconcile", "credits balance "+users[0],
		"replay --all --to=outbox.side", "replay --all", "trace "+event, "phantoms",
		"groups drop --stream=outbox.a --group=g --yes --force")
	if relay.logged("adopting again") { // a sweeping relay may notice that a stream was dropped
		t.Errorf("the relay has adopted more than once:\n%s", relay.output())
	}
	each("streams drop --stream=outbox.f --yes", "dead retry --all", "adopt --yes")
	relay.answers()
	api.answers()
	for _, c := range []*child{relay, api} {
		c.waitHealthy()
	}
}

// Every process and command works with a cluster whose keys are on three masters.
func TestACluster(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0)
	w := worldAt(t, c.URL(), c.Client)
	w.worksWith()
	// As with a managed service, the URL has only the address of one node.
	one := "redis://" + c.Nodes[2].Addr()
	w.once("doctor", "--redis-url="+one).says(t, 0, "3 masters and 0 replicas")
	w.once("groups", "list", "--redis-url="+one).says(t, 0, "outbox.b")
	w.once("groups", "list", "--redis-url="+one+"/1").warns(t, 2, "database 0")
}

// The same with a cluster whose nodes only accept TLS, also among themselves, and require a certificate.
func TestAClusterBehindTLS(t *testing.T) {
	t.Parallel()
	ca := testenv.NewCA(t)
	cert, key, caFile := ca.Files(t, t.TempDir())
	c := testenv.ClusterOf(t, local.ClusterOptions{
		Masters: 3,
		Access: local.Access{
			TLS: &tls.Config{Certificates: []tls.Certificate{ca.Pair(t)}, InsecureSkipVerify: true},
		},
		Config: []string{
			"tls-cert-file " + cert, "tls-key-file " + key, "tls-ca-cert-file " + caFile, "tls-auth-clients yes",
		},
	})
	w := worldAt(t, c.URL(), c.Client)
	own := []string{"--redis-cert=" + cert, "--redis-key=" + key}
	files := append([]string{"--redis-ca=" + caFile}, own...)
	w.worksWith(files...)
	one := "--redis-url=rediss://" + c.Nodes[1].Addr()
	w.once(append([]string{"doctor", one}, files...)...).says(t, 0, "3 masters and 0 replicas")
	_, _, wrong := testenv.NewCA(t).Files(t, t.TempDir())
	for _, url := range []string{"--redis-url=" + w.rdURL, one} {
		w.once(append([]string{"groups", "list", url, "--redis-ca=" + wrong}, own...)...).
			warns(t, 1, "check the certificates: --redis-ca")
		w.once("groups", "list", url, "--redis-ca="+caFile).says(t, 1)
	}
}

// A process that starts while Redis is down assumes that one address is one server. If the address turns out to belong
// to a cluster, the process stays unready, reports a remedy, and works after a restart.
func TestAClusterThatAppearsLater(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0)
	w := worldAt(t, "redis://"+c.Nodes[0].Addr(), c.Client)
	must(t, c.Kill())
	relay := w.spawn("relay")
	relay.waitUnready("connection refused")
	must(t, c.Start(t.Context()))
	relay.waitUnready("restart it, or name the cluster in the URL with addr=host:port")
	if relay.stop() != 0 {
		t.Error("it does not stop")
	}
	w.spawn("relay").waitReady("")
	w.delivers()
}

// The same with sentinels, over TLS and with their own users. The primary is replaced in between, and everything
// continues.
func TestSentinel(t *testing.T) {
	t.Parallel()
	ca := testenv.NewCA(t)
	cert, key, caFile := ca.Files(t, t.TempDir())
	lines := []string{"tls-cert-file " + cert, "tls-key-file " + key, "tls-ca-cert-file " + caFile}
	s := testenv.SentinelOf(t, local.SentinelOptions{
		Replicas: 1, Sentinels: 3, SentinelUser: "watcher", SentinelPassword: "watch-" + secret,
		Access: local.Access{
			User: "app", Password: secret,
			TLS: &tls.Config{Certificates: []tls.Certificate{ca.Pair(t)}, InsecureSkipVerify: true},
		},
		Config: lines,
		// The rights are those in docs/operations.md.
		SentinelConfig: append(lines, "user asker on >ask-"+secret+" allchannels -@all +@connection +subscribe "+
			"+psubscribe +sentinel|get-master-addr-by-name +sentinel|sentinels"),
	})
	u, err := url.Parse(s.URL())
	must(t, err)
	u.User = url.UserPassword("asker", "ask-"+secret)
	o, err := redisurl.Parse(u.String())
	must(t, err)
	o.TLSConfig.Certificates, o.TLSConfig.InsecureSkipVerify = []tls.Certificate{ca.Pair(t)}, true
	client := redis.NewUniversalClient(o)
	t.Cleanup(func() { _ = client.Close() })
	w := worldAt(t, u.String(), client)
	files := []string{"--redis-ca=" + caFile, "--redis-cert=" + cert, "--redis-key=" + key}
	w.worksWith(files...)
	testenv.Eventually(t, 20*time.Second, func() error { // on a busy machine, loading the certificate may take longer
		r := w.once("doctor", "--redis-cert="+cert, "--redis-key="+key)
		return testenv.FailIf(r.code != 1 || !strings.Contains(r.out, "check the certificates"),
			"with an unknown CA: %+v", r)
	})

	relay, api := w.spawn("relay", files...), w.spawn("serve", append(files, "--guard-redis-url="+w.rdURL)...)
	group := w.spawn("consume", append([]string{"--group=after"}, files...)...)
	relay.waitReady("")
	old, err := s.Master(t.Context())
	must(t, err)
	must(t, s.Servers[old].Kill())
	s.Promoted(t, old)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 100, Types: []string{"later"}})
	user := uuid.NewString()
	w.post(api, "/orders", uuid.NewString(), fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`, user),
		http.StatusCreated)
	w.post(api, "/add/"+user, uuid.NewString(), `{"amount":10}`, http.StatusOK)
	load.Wait()
	w.oracle.Check(t, load, 30*time.Second)
	group.waitLogged("later.changed")
	relay.waitReady("")
	hides(t, secret, relay.output(), api.output(), group.output())
}

// Every process and command works on services that only resemble Redis: they refuse what is not needed, limit the
// arguments of a call, give each connection another identity, refuse undeclared keys, and have Lua 5.4.
func TestOnAStrangeRedis(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		odd link.Oddities
		// unknown is what doctor and status report once.
		unknown, mode string
	}{
		"refusals":   {link.Oddities{Refuse: link.Refusals, MaxArgs: 3999, Strict: true}, "Redis refuses INFO", "cdc"},
		"identities": {link.Oddities{Identities: true, MaxArgs: 3999, Strict: true}, "another run id", "poll"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inMode(t, c.mode, func(t *testing.T, mode string) {
				w := newWorld(t)
				p := testenv.Strange(t, w.redis, c.odd)
				w.rdURL = "redis://" + p.Addr()
				w.desire(mode)
				w.worksWith()
				w.db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, headers)
					SELECT 'traced', 'a', 'x.changed', '{}',
						'{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'
					FROM pg_catalog.generate_series(1, 995)`)
				w.waitLen("outbox.traced", 995)
				w.retryTrimmed()
				if n := p.Most(); n > 3900 {
					t.Errorf("a call had %d arguments", n)
				}
				for _, command := range []string{"status", "doctor"} {
					r := w.once(command)
					if n := strings.Count(r.out, c.unknown); r.code != 0 || n != 1 {
						t.Errorf("%s: exit %d, %q %d times: %s%s", command, r.code, c.unknown, n, r.out, r.errOut)
					}
				}
			})
		})
	}
}

// retryTrimmed retries a dead event whose entry has left its stream.
func (w *world) retryTrimmed() {
	w.t.Helper()
	ctx, client := w.t.Context(), w.redis.Client
	first := client.XRangeN(ctx, "outbox.traced", "-", "+", 1).Val()[0]
	w.gaveUp("outbox.traced", "mailer", first.ID, first.Values)
	do(w.t, client, "xgroup", "create", "outbox.traced", "mailer", "0")
	do(w.t, client, "xdel", "outbox.traced", first.ID)
	w.once("dead", "retry", "--all").says(w.t, 0)
	testenv.Eventually(w.t, 10*time.Second, func() error {
		last, err := client.XRevRangeN(ctx, "outbox.traced", "+", "-", 1).Result()
		return testenv.FailIf(err != nil || last[0].Values["for_group"] != "mailer", "the last entry is %v, %w", last,
			err)
	})
}
