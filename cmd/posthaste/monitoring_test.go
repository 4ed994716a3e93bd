package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// TestMonitoring lets Prometheus scrape every process of a system under load while its modes change. Every query of
// every panel, every annotation and docs/metrics.md returns a value, every rule is healthy, and exemplars lead to
// traces.
func TestMonitoring(t *testing.T) {
	t.Parallel()
	db := testenv.NewServer(t, "max_slot_wal_keep_size=1GB").Database(t)
	// A durability is configured, so that the wait for it is measured too.
	w := worldOf(t, db, testenv.Valkey(t, "appendonly yes", "maxmemory 256mb", "maxmemory-policy noeviction"))
	w.env = append(w.env, "POSTHASTE_REDIS_DURABILITY=aof")
	relays := []*child{w.spawn("relay"), w.spawn("relay")}
	api, consume := w.spawn("serve"), w.spawn("consume", "--group=shop")
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	}))
	defer receiver.Close()
	deliver := w.spawn("deliver", "--group=hooks", "--to="+receiver.URL)
	w.waitMode("cdc") // before that, there may be no relay whose mode could be set
	p := startPrometheus(t, map[string][]*child{
		"posthaste-relay": relays, "posthaste-api": {api}, "posthaste-consumer": {consume, deliver},
	})
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	for range 2 {
		wg.Go(func() { customer(ctx, api.http) })
	}
	wg.Go(func() {
		for modes := []outbox.Mode{outbox.ModePoll, outbox.ModeAuto}; ctx.Err() == nil; modes[0], modes[1] = modes[1],
			modes[0] {
			if err := sql.SetDesired(ctx, db.Pool, db.Relay, modes[0]); err != nil && ctx.Err() == nil {
				t.Errorf("toggle: %v", err)
			}
			_ = pause.For(ctx, 3*time.Second)
		}
	})
	waiting := queriesOf(t)
	for _, counted := range []string{
		`outbox_events_written_total{type="credits.added"}`,
		`outbox_events_written_total{type="credits.deducted"}`, `pg_pool_acquires_total{job="posthaste-api"}`,
	} {
		waiting[counted+" > 0"] = "what is counted"
	}
	t.Logf("%d queries", len(waiting))
	testenv.Eventually(t, 3*time.Minute, func() error {
		var first error
		for expr, where := range waiting {
			if err := p.answers(expr); err != nil {
				first = fmt.Errorf("%d queries have no answer, one of them %s: %s: %w", len(waiting), where, expr, err)
				continue
			}
			delete(waiting, expr)
		}
		return first
	})
	for _, name := range []string{
		"outbox_commit_to_publish_seconds", "http_request_duration_seconds",
		"outbox_consumer_handle_seconds", "outbox_consumer_delay_seconds",
	} {
		testenv.Eventually(t, 30*time.Second, func() error { return p.exemplar(name) })
	}
	testenv.Eventually(t, 30*time.Second, p.rules)
}

// customer places an order, repeats the request before the first response, reads the order, and moves credits.
func customer(ctx context.Context, base string) {
	user := uuid.NewString()
	order := fmt.Sprintf(`{"user_id":%q,"amount":100,"currency":"USD"}`, user)
	for ctx.Err() == nil {
		key := uuid.NewString()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { request(ctx, http.MethodPost, base+"/orders", key, order) })
		}
		wg.Wait()
		request(ctx, http.MethodPost, base+"/orders", key, strings.Replace(order, "100", "101", 1)) // a used key
		request(ctx, http.MethodGet, base+"/orders?user_id="+user, "", "")
		request(ctx, http.MethodPost, base+"/add/"+user, uuid.NewString(), `{"amount":2}`)
		request(ctx, http.MethodPost, base+"/deduct/"+user, uuid.NewString(), `{"amount":1}`)
		request(ctx, http.MethodGet, base+"/balance/"+user, "", "")
		_ = pause.For(ctx, 100*time.Millisecond)
	}
}

// request sends a request as part of a sampled trace. Its outcome appears in the metrics.
func request(ctx context.Context, method, url, key, body string) {
	headers := []string{
		"Traceparent", fmt.Sprintf("00-%s-00f067aa0ba902b7-01", strings.ReplaceAll(uuid.NewString(), "-", "")),
	}
	if key != "" {
		headers = append(headers, "Idempotency-Key", strconv.Quote(key))
	}
	_, _ = testenv.Request(ctx, method, url, body, headers...)
}

// grafanaVars replaces the variables of Grafana: with every job and instance, and with windows that suit a scrape every
// second.
var grafanaVars = strings.NewReplacer("$job", ".+", "$instance", ".+", "$__rate_interval", "10s", "$__range", "1m")

// queriesOf returns every documented query, with its location as key.
func queriesOf(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	root := testenv.Root(t)
	files, err := filepath.Glob(filepath.Join(root, "grafana", "dashboards", "*.json"))
	if err != nil || len(files) != 6 {
		t.Fatalf("dashboards: %v, %v; want six", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		type panel struct {
			Title   string
			Targets []struct{ Expr string }
			Panels  []panel // those of a folded row
		}
		var board struct {
			Panels      []panel
			Annotations struct{ List []struct{ Name, Expr string } }
		}
		must(t, json.Unmarshal(text, &board))
		for _, p := range board.Panels {
			board.Panels = append(board.Panels, p.Panels...)
		}
		for _, p := range board.Panels {
			for _, q := range p.Targets {
				all[grafanaVars.Replace(q.Expr)] = filepath.Base(file) + ", " + p.Title
			}
		}
		for _, a := range board.Annotations.List {
			all[grafanaVars.Replace(a.Expr)] = filepath.Base(file) + ", " + a.Name
		}
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "metrics.md"))
	must(t, err)
	for _, m := range regexp.MustCompile("(?m)^\\| <a id=.* \\| `(.+)` \\|$").FindAllStringSubmatch(string(page), -1) {
		all[m[1]] = "docs/metrics.md"
	}
	return all
}

// scraper is a Prometheus that scrapes every second.
type scraper struct{ url string }

// startPrometheus starts a Prometheus that scrapes the processes by their job, and evaluates the rules of
// grafana/prometheus.
func startPrometheus(t *testing.T, jobs map[string][]*child) *scraper {
	t.Helper()
	bin, err := exec.LookPath("prometheus")
	if err != nil {
		t.Fatalf("prometheus is missing: run scripts/ensure.sh prometheus (%v)", err)
	}
	dir := t.TempDir()
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n",
		filepath.Join(testenv.Root(t), "grafana", "prometheus", "rules", "*.yml"))
	for job, children := range jobs {
		var targets []string
		for _, c := range children {
			targets = append(targets, strconv.Quote(strings.TrimPrefix(c.admin, "http://")))
		}
		config += fmt.Sprintf("  - {job_name: %s, static_configs: [{targets: [%s]}]}\n", job,
			strings.Join(targets, ", "))
	}
	file := filepath.Join(dir, "prometheus.yml")
	must(t, os.WriteFile(file, []byte(config), 0o600))
	port, hold, err := local.ReservePort()
	must(t, err)
	t.Cleanup(func() { _ = hold.Close() })
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	var log strings.Builder
	args := []string{
		"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(dir, "data"), "--web.listen-address=" + addr,
		"--enable-feature=exemplar-storage", "--log.level=warn",
	}
	cmd := exec.Command(bin, args...) //nolint:noctx // ended by the test
	cmd.Stderr = &log
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("prometheus: %s", log.String())
		}
	})
	testenv.Start(t, cmd)
	s := &scraper{"http://" + addr}
	testenv.Eventually(t, 30*time.Second, func() error {
		var status map[string]any
		return s.ask("/api/v1/status/buildinfo", nil, &status)
	})
	return s
}

// ask calls the API and decodes the data of the response.
func (s *scraper) ask(path string, form url.Values, data any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := testenv.Request(ctx, http.MethodGet, s.url+path+"?"+form.Encode(), "")
	if err != nil {
		return err
	}
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.Unmarshal(a.Body, &answer); err != nil {
		return err
	}
	return testenv.FailIf(answer.Status != "success", "%s: %s", answer.Status, answer.Error)
}

// answers returns an error unless a query has a value now.
func (s *scraper) answers(expr string) error {
	var data struct {
		Result []struct {
			Value [2]any
		}
	}
	if err := s.ask("/api/v1/query", url.Values{"query": {expr}}, &data); err != nil {
		return err
	}
	for _, r := range data.Result {
		text, _ := r.Value[1].(string)
		if v, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(v) {
			return nil
		}
	}
	return fmt.Errorf("%d series, and no value", len(data.Result))
}

// exemplar returns an error unless the histogram's buckets lead to a trace.
func (s *scraper) exemplar(name string) error {
	now := time.Now()
	var data []struct {
		Exemplars []struct{ Labels map[string]string }
	}
	err := s.ask("/api/v1/query_exemplars", url.Values{
		"query": {name + "_bucket"}, "start": {strconv.FormatInt(now.Add(-time.Minute).Unix(), 10)},
		"end": {strconv.FormatInt(now.Unix()+1, 10)},
	}, &data)
	if err != nil {
		return err
	}
	for _, d := range data {
		for _, e := range d.Exemplars {
			if len(e.Labels["trace_id"]) == 32 {
				return nil
			}
		}
	}
	return fmt.Errorf("%s has no exemplar with a trace", name)
}

// rules returns an error unless every rule was evaluated successfully.
func (s *scraper) rules() error {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := s.ask("/api/v1/rules", nil, &data); err != nil {
		return err
	}
	n := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			n++
			if r.Health != "ok" {
				return fmt.Errorf("rule %s is %s: %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	return testenv.FailIf(n < 20, "%d rules; want all of grafana/prometheus/rules", n)
}

// TestScrapesNeverWait checks that every scrape is answered while neither Postgres nor Redis responds and connections
// hang.
func TestScrapesNeverWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	servers := []*testenv.Link{testenv.NewLink(t, hostOf(t, w.pgURL)), testenv.NewLink(t, hostOf(t, w.rdURL))}
	w.pgURL = strings.Replace(w.pgURL, hostOf(t, w.pgURL), servers[0].Addr(), 1)
	w.rdURL = strings.Replace(w.rdURL, hostOf(t, w.rdURL), servers[1].Addr(), 1)
	relay, api, consume := w.spawn("relay"), w.spawn("serve"), w.spawn("consume", "--group=g")
	w.waitMode("cdc")
	if a, err := placeOrder(t.Context(), api.http, 7); err != nil || a.status != http.StatusCreated {
		t.Fatalf("order: %d, %v", a.status, err)
	}
	present(t, consume, `outbox_consumer_delay_seconds_count{group="g"} 1`)
	for _, p := range servers {
		p.Set(testenv.Trouble{LoseReplies: true})
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		for ctx.Err() == nil {
			_, _ = placeOrder(ctx, api.http, 7) // these requests hang, too
		}
	}()
	counts := func(series string) func(string) bool {
		return func(text string) bool { n, _ := sample(text, series); return n > 0 }
	}
	for _, c := range []struct {
		*child
		process string
		noticed func(text string) bool // the process has noticed that the servers do not respond
	}{
		{relay, "relay", func(string) bool {
			status, _ := relay.get("/readyz", nil)
			return status == http.StatusServiceUnavailable
		}},
		{api, "serve", counts(`http_request_duration_seconds_count{method="POST",route="/orders",status="503"}`)},
		{consume, "consume", counts(`outbox_consumer_redis_errors_total{op="inspect"}`)},
	} {
		testenv.Eventually(t, time.Minute, func() error {
			text, err := c.metrics()
			if err != nil {
				t.Fatalf("%s: a scrape waits for its servers: %v", c.process, err)
			}
			return testenv.FailIf(!c.noticed(text), "%s", c.process+" has not noticed that its servers are gone")
		})
	}
	for _, c := range []*child{relay, api, consume} {
		c.signal(syscall.SIGKILL) // an orderly stop would block
	}
}

// present waits until /metrics has a series that begins with each text.
func present(t *testing.T, c *child, series ...string) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, func() error {
		text, err := c.metrics()
		if err != nil {
			return err
		}
		var missing []string
		for _, s := range series {
			if !strings.Contains(text, "\n"+s) {
				missing = append(missing, s)
			}
		}
		return testenv.FailIf(len(missing) > 0, "no series %s", strings.Join(missing, ", "))
	})
}
