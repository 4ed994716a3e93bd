package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

// worldAt is a world whose Redis is at a URL.
func worldAt(t *testing.T, url string, client redis.UniversalClient) *world {
	t.Helper()
	db := testenv.Postgres(t)
	return &world{
		t: t, db: db, pgURL: db.URL, rdURL: url,
		oracle: testenv.Oracle{DB: db, Redis: client, Prefix: "outbox."},
	}
}

// post posts again under the same key until it is answered as wanted, by Redis and not around it.
func (w *world) post(api *child, path, key, body string, want int) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, api.http+path, strings.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Idempotency-Key", key)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		res.Body.Close()
		if res.StatusCode != want || res.Header.Get("Idempotency-Guard") == "db" {
			return fmt.Errorf("POST %s: %d, headers %v\n%s", path, res.StatusCode, res.Header, api.output())
		}
		return nil
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
	relay.waitReady(t, http.StatusOK, "")
	types := []string{"a", "b", "c", "d", "e", "f"} // of one slot of each of three masters, and more
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 300, Types: types})
	user := uuid.NewString()
	order := fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`, user)
	for key := range 8 { // they are in several slots, too
		for range 2 { // the second is answered from Redis
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
	var event string
	if err := w.db.Pool.QueryRow(t.Context(), "SELECT id FROM outbox_history WHERE aggregate_type = 'c' LIMIT 1").
		Scan(&event); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{
		"status", "doctor", "groups list", "dead list", "dead retry --group=g --all --yes", "credits reconcile",
		"credits balance " + users[0], "replay --all --to=outbox.side", "replay --all", "trace " + event, "phantoms",
		"adopt --all --yes", "groups drop --stream=outbox.a --group=g --yes --force", "streams drop outbox.side --yes",
	} {
		r := w.once(append(strings.Fields(command), settings...)...)
		if r.code != 0 {
			t.Errorf("posthaste %s: exit %d: %s%s", command, r.code, r.out, r.errOut)
		}
		t.Logf("%s: %s%s", command, r.out, r.errOut)
	}
	for _, c := range []*child{relay, api} {
		for _, path := range []string{"/relay", "/relay/dead", "/console/api/state", "/console/api/dead"} {
			var page any
			if status, err := c.get(path, &page); err != nil || status != http.StatusOK {
				t.Errorf("%s: %d, %v", path, status, err)
			}
		}
	}
	for _, c := range []*child{relay, api} {
		testenv.Eventually(t, 20*time.Second, func() error {
			var h readiness
			if status, err := c.get("/readyz", &h); err != nil || status != http.StatusOK || len(h.Degraded) > 0 {
				return fmt.Errorf("readyz: %d %+v, %w", status, h, err)
			}
			return nil
		})
	}
	for _, c := range []*child{relay, api, group, ordered} {
		for line := range strings.Lines(c.output()) {
			if strings.Contains(line, `"level":"WARN"`) || strings.Contains(line, `"level":"ERROR"`) {
				t.Logf("%s", line)
			}
		}
	}
}

// Every process and command works with a cluster, whose keys are on three masters.
func TestACluster(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0)
	w := worldAt(t, c.URL(), c.Client)
	w.worksWith()
}

// … and with sentinels, who say which server it is, over TLS and with users of their own.
func TestSentinel(t *testing.T) {
	t.Parallel()
	s := testenv.SentinelOf(t, local.SentinelOptions{Replicas: 1, Sentinels: 3})
	client, err := redisClient(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	w := worldAt(t, s.URL(), client)
	w.worksWith()
}

// redisClient is a client of the test's own.
func redisClient(url string) (redis.UniversalClient, error) {
	o, err := redis.ParseFailoverURL(url)
	if err != nil {
		return nil, err
	}
	return redis.NewFailoverClient(o), nil
}
