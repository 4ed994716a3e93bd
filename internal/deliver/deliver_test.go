package deliver_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/deliver"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/tlsfile"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

var must = testenv.Must

const (
	stream = "outbox.order"
	trace  = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	// private is in payloads, URLs and responses. Neither logs nor errors may contain it.
	private = "pr1vate"
)

var (
	oldSecret = secretOf("an old secret of the receiver")
	newSecret = secretOf("a new secret of the receiver")
)

func secretOf(key string) string { return "whsec_" + base64.StdEncoding.EncodeToString([]byte(key)) }

// post is a request as the receiver gets it.
type post struct {
	header http.Header
	body   []byte
}

func (p post) id() string { return p.header.Get("Webhook-Id") }

// signedBy reports by which secrets the request is signed, in their order.
func (p post) signedBy(secrets ...string) (by []string) {
	for signature := range strings.SplitSeq(p.header.Get("Webhook-Signature"), " ") {
		for _, s := range secrets {
			key, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(s, "whsec_"))
			m := hmac.New(sha256.New, key)
			_, _ = io.WriteString(m, p.id()+"."+p.header.Get("Webhook-Timestamp")+"."+string(p.body))
			if signature == "v1,"+base64.StdEncoding.EncodeToString(m.Sum(nil)) {
				by = append(by, s)
			}
		}
	}
	return by
}

// receiver collects requests and answers with answer.
type receiver struct {
	*httptest.Server

	mu     sync.Mutex
	posts  []post
	answer func(w http.ResponseWriter, p post)
}

func receive(t *testing.T, answer func(w http.ResponseWriter, p post)) *receiver {
	t.Helper()
	r := unstarted(answer)
	r.Start()
	t.Cleanup(r.Close)
	return r
}

func unstarted(answer func(w http.ResponseWriter, p post)) *receiver {
	r := &receiver{answer: answer}
	r.Server = httptest.NewUnstartedServer(r)
	r.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return // cut off
	}
	p := post{req.Header, body}
	r.mu.Lock()
	r.posts = append(r.posts, p)
	r.mu.Unlock()
	r.answer(w, p)
}

func (r *receiver) got() []post {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.posts)
}

// status returns an answer that is always the same, with a body that must not be logged.
func status(code int, headers ...string) func(w http.ResponseWriter, p post) {
	return func(w http.ResponseWriter, _ post) {
		for i := 0; i < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, private)
	}
}

// sender returns a sender to url. Its log must not contain private text.
func sender(t *testing.T, url string, change ...func(o *deliver.Options)) *deliver.Sender {
	t.Helper()
	o := deliver.Options{
		Group: "g", To: url + "/hook?token=" + private, Timeout: 20 * time.Second, Gone: func(error) {},
		Logger: slog.New(slog.NewTextHandler(checked{t}, nil)),
	}
	for _, c := range change {
		c(&o)
	}
	s, err := deliver.New(o)
	must(t, err)
	return s
}

// checked is a log that must contain neither secrets nor private text.
type checked struct{ t *testing.T }

func (c checked) Write(b []byte) (int, error) {
	for _, s := range []string{private, oldSecret, newSecret} {
		if bytes.Contains(b, []byte(s)) {
			c.t.Errorf("logged: %s", b)
		}
	}
	return len(b), nil
}

func event(id, subject string) consumer.Event {
	return consumer.Event{
		ID: id, Type: "order.created", Source: "/posthaste/default", Subject: subject, TraceParent: trace,
		Time: time.Date(2026, 1, 2, 3, 4, 5, 670000, time.UTC), Stream: stream,
		Data: []byte(`{"n": 1.50, "note": "<` + private + `>"}`),
	}
}

func TestRequestIsASignedCloudEvent(t *testing.T) {
	t.Parallel()
	r := receive(t, status(http.StatusAccepted))
	file := testenv.WriteFile(t, t.TempDir(), "secrets", []byte(newSecret+"\n"))
	s := sender(t, r.URL, func(o *deliver.Options) { o.SecretFile = file })
	began := time.Now().Unix()
	must(t, s.Handle(t.Context(), event("e1", "a")))
	bare := event("e2", "")
	bare.Time, bare.Data, bare.TraceParent = time.Time{}, nil, ""
	bare.Headers = map[string]string{
		"tenant": "acme", "x-trace": "not allowed", "subject": "reserved", "id": "reserved",
	}
	must(t, s.Handle(t.Context(), bare))
	posts := r.got()
	sent, err := strconv.ParseInt(posts[0].header.Get("Webhook-Timestamp"), 10, 64)
	if err != nil || sent < began || sent > time.Now().Unix() {
		t.Errorf("webhook-timestamp %q", posts[0].header.Get("Webhook-Timestamp"))
	}
	if posts[0].header.Get("Content-Type") != "application/cloudevents+json" || posts[0].id() != "e1" ||
		len(posts[0].signedBy(newSecret)) != 1 {
		t.Errorf("headers %v", posts[0].header)
	}
	const want = `{"data":{"n":1.50,"note":"<pr1vate>"},"datacontenttype":"application/json","id":"e1",` +
		`"source":"/posthaste/default","specversion":"1.0","subject":"a","time":"2026-01-02T03:04:05.000670Z",` +
		`"traceparent":"` + trace + `","type":"order.created"}`
	testenv.Equal(t, "body", string(posts[0].body), want)
	const wantBare = `{"id":"e2","source":"/posthaste/default","specversion":"1.0","tenant":"acme",` +
		`"type":"order.created"}`
	testenv.Equal(t, "body", string(posts[1].body), wantBare)
}

// kind is what package consumer makes of an error.
func kind(err error) string {
	var u interface{ Unavailable() bool }
	var p interface{ Permanent() bool }
	switch {
	case err == nil:
		return "done"
	case errors.As(err, &u):
		return "unavailable"
	case errors.As(err, &p):
		return "permanent"
	}
	return "attempt"
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	elsewhere := receive(t, status(http.StatusOK))
	for code, want := range map[int]string{
		200: "done", 202: "done", 204: "done", 408: "unavailable", 410: "unavailable", 429: "unavailable",
		500: "unavailable", 501: "unavailable", 503: "unavailable", 599: "unavailable", 301: "attempt", 302: "attempt",
		304: "attempt", 307: "attempt", 308: "attempt", 400: "attempt", 401: "attempt", 404: "attempt", 413: "attempt",
		422: "attempt",
	} {
		r := receive(t, status(code, "Location", elsewhere.URL))
		var gone error
		reg := prometheus.NewPedanticRegistry()
		s := sender(t, r.URL, func(o *deliver.Options) { o.Gone, o.Registerer = func(err error) { gone = err }, reg })
		err := s.Handle(t.Context(), event("e", "a"))
		testenv.Equal(t, fmt.Sprintf("status %d: %v", code, err), kind(err), want)
		if err != nil && (strings.Contains(err.Error(), private) ||
			!strings.Contains(err.Error(), strconv.Itoa(code))) {
			t.Errorf("status %d: error %v", code, err)
		}
		if redirect := code/100 == 3; redirect && !strings.Contains(err.Error(), "redirects are not followed") {
			t.Errorf("status %d: error %v", code, err)
		}
		if (gone != nil) != (code == 410) {
			t.Errorf("status %d: gone: %v", code, gone)
		}
		class := map[string]string{"done": "accepted", "attempt": "refused", "unavailable": "busy"}[want]
		if code == 410 {
			class = "gone"
		}
		testenv.Equal(t, fmt.Sprintf("status %d: outcomes %s", code, class), count(t, reg, class), 1)
	}
	testenv.Equal(t, "redirects that were followed", len(elsewhere.got()), 0)
}

// count returns how many requests a registry has of an outcome.
func count(t *testing.T, reg *prometheus.Registry, outcome string) uint64 {
	t.Helper()
	families, err := reg.Gather()
	must(t, err)
	for _, m := range families[0].GetMetric() {
		if m.GetLabel()[1].GetValue() == outcome {
			return m.GetHistogram().GetSampleCount()
		}
	}
	return 0
}

func TestUnreachableReceivers(t *testing.T) {
	t.Parallel()
	silent := receive(t, nil)
	release := make(chan struct{})
	silent.answer = func(http.ResponseWriter, post) { <-release }
	defer close(release)
	closed := receive(t, status(http.StatusOK))
	closed.Close()
	cut := receive(t, func(http.ResponseWriter, post) { panic(http.ErrAbortHandler) })
	other := receive(t, nil)
	other.answer = func(w http.ResponseWriter, _ post) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_, _ = io.WriteString(conn, private+" is not HTTP\r\n\r\n")
			_ = conn.Close()
		}
	}
	flood := receive(t, func(w http.ResponseWriter, _ post) {
		w.Header().Set("X-Flood", strings.Repeat(private, 100_000))
	})
	for name, url := range map[string]string{
		"silent": silent.URL, "closed": closed.URL, "cut off": cut.URL, "not HTTP": other.URL,
		"not TLS": strings.Replace(cut.URL, "http", "https", 1), "unknown host": "http://receiver.invalid",
		"large header": flood.URL,
	} {
		reg := prometheus.NewPedanticRegistry()
		s := sender(t, url, func(o *deliver.Options) {
			if o.Registerer = reg; name == "silent" {
				o.Timeout = 50 * time.Millisecond
			}
		})
		err := s.Handle(t.Context(), event("e", "a"))
		if kind(err) != "unavailable" || strings.Contains(err.Error(), private) || count(t, reg, "unreachable") != 1 {
			t.Errorf("%s: %s: %v", name, kind(err), err)
		}
	}
}

// The body of a response is not needed: one without end does not hold up or fail an accepted event.
func TestEndlessResponseIsAccepted(t *testing.T) {
	t.Parallel()
	r := receive(t, func(w http.ResponseWriter, _ post) {
		for {
			if _, err := w.Write(make([]byte, 32<<10)); err != nil {
				return
			}
		}
	})
	must(t, sender(t, r.URL).Handle(t.Context(), event("e", "a")))
}

// No retry can help an event that cannot be sent.
func TestUnsendableEventsArePermanent(t *testing.T) {
	t.Parallel()
	r := receive(t, status(http.StatusOK))
	s := sender(t, r.URL)
	noJSON, badID := event("e", "a"), event("e\r\nX-Injected: 1", "a")
	noJSON.Data = []byte(private)
	for _, ev := range []consumer.Event{noJSON, badID} {
		if err := s.Handle(t.Context(), ev); kind(err) != "permanent" || strings.Contains(err.Error(), private) {
			t.Errorf("%q: %s: %v", ev.ID, kind(err), err)
		}
	}
	testenv.Equal(t, "requests", len(r.got()), 0)
}

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	soon := time.Now().Add(30 * time.Minute)
	for header, want := range map[string]struct{ least, most time.Duration }{
		"120": {2 * time.Minute, 2 * time.Minute}, "0": {}, "": {}, "-5": {}, "soon": {}, "1e3": {},
		"999999":                               {time.Hour, time.Hour},
		"99999999999999999999":                 {},
		soon.UTC().Format(http.TimeFormat):     {1, 30 * time.Minute},
		"Fri, 31 Dec 2100 23:59:59 GMT":        {time.Hour, time.Hour},
		"Fri, 31 Dec 1999 23:59:59 GMT":        {},
		soon.UTC().Format(time.RFC850):         {1, 30 * time.Minute},
		soon.UTC().Format(http.TimeFormat)[5:]: {},
	} {
		for _, code := range []int{408, 429, 503} {
			r := receive(t, status(code, "Retry-After", header))
			s := sender(t, r.URL)
			err := s.Handle(t.Context(), event("e", "a"))
			var after interface{ RetryAfter() time.Duration }
			if !errors.As(err, &after) || after.RetryAfter() < want.least || after.RetryAfter() > want.most {
				t.Errorf("%d, Retry-After %q: %v", code, header, err)
			}
			if want.least < time.Minute {
				continue
			}
			// Until then, no event is sent.
			err = s.Handle(t.Context(), event("f", "b"))
			if n := len(r.got()); n != 1 || kind(err) != "unavailable" {
				t.Errorf("%d, Retry-After %q: %d requests, %v", code, header, n, err)
			}
		}
	}
}

// The secrets are replaced while events are sent. A file that cannot be used changes nothing.
func TestSecretsAreReplaced(t *testing.T) {
	t.Parallel()
	r := receive(t, status(http.StatusOK))
	file := testenv.WriteFile(t, t.TempDir(), "secrets", []byte(oldSecret))
	var log bytes.Buffer
	s := sender(t, r.URL, func(o *deliver.Options) {
		o.SecretFile, o.Logger = file, slog.New(slog.NewTextHandler(io.MultiWriter(&log, checked{t}), nil))
	})
	for _, step := range []struct {
		content string
		by      []string
		errors  int
	}{
		{oldSecret, []string{oldSecret}, 0},
		{newSecret + "\n" + oldSecret + "\n", []string{newSecret, oldSecret}, 0},
		{"", []string{newSecret, oldSecret}, 1},
		{"", []string{newSecret, oldSecret}, 1},
		{newSecret[:10] + "\n!", []string{newSecret, oldSecret}, 2},
		{"gone", []string{newSecret, oldSecret}, 3},
		{newSecret + "\r\n", []string{newSecret}, 3},
		{strings.TrimRight(oldSecret, "="), []string{oldSecret}, 3},
	} {
		must(t, os.WriteFile(file, []byte(step.content), 0o600))
		if step.content == "gone" {
			must(t, os.Remove(file))
		}
		must(t, s.Handle(t.Context(), event("e", "a")))
		posts := r.got()
		if by := posts[len(posts)-1].signedBy(oldSecret, newSecret); !slices.Equal(by, step.by) {
			t.Errorf("with %q: signed by %q, want %q", step.content, by, step.by)
		}
		testenv.Equal(t, "log lines with "+step.content, strings.Count(log.String(), "cannot be used"), step.errors)
	}
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(text string) string {
		return testenv.WriteFile(t, dir,
			strconv.Itoa(len(text))+"-"+base64.URLEncoding.EncodeToString([]byte(text))[:8],
			[]byte(text))
	}
	for _, c := range []struct{ to, secret, want string }{
		{"example.com/" + private, "", "--to: want a URL with its scheme"},
		{"ftp://example.com", "", "--to: want"},
		{"https://", "", "--to: want"},
		{"https://u:" + private + "@h:port", "", "--to: want"},
		{"https://h", dir + "/none", "none: no such file or directory: want a file that this user may read; make one"},
		{"https://h", dir, "is a directory"},
		{"https://h", file(private + "-without-prefix"), "does not begin with whsec_; make one with"},
		{"https://h", file("whsec_" + private + "%%"), "is not base64 after whsec_"},
		{"https://h", file("whsec_      "), "is not base64 after whsec_"},
		{"https://h", file("          "), "is empty"},
		{"https://h", file(strings.Repeat(oldSecret+"\n", 3)), "more than two secrets"},
	} {
		_, err := deliver.New(deliver.Options{Group: "g", To: c.to, SecretFile: c.secret, Timeout: time.Second})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), private) ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%s, %s: %v, want %q", c.to, c.secret, err, c.want)
		}
	}
}

// The receiver requires a certificate. Sender presents the one of its files, also after these have changed. Package
// tlsfile tests what is refused.
func TestTLSWithClientCertificates(t *testing.T) {
	t.Parallel()
	ca, next := testenv.NewCA(t), testenv.NewCA(t)
	dir := t.TempDir()
	cert, key, caFile := ca.Files(t, dir)
	var config atomic.Pointer[tls.Config]
	serve := func(ca *testenv.CA) {
		config.Store(&tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{ca.Pair(t)}, ClientCAs: ca.Pool,
			ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2", "http/1.1"},
		})
	}
	serve(ca)
	var protocol atomic.Value
	r := unstarted(status(http.StatusOK))
	r.EnableHTTP2 = true
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		protocol.Store(req.Proto)
		r.ServeHTTP(w, req)
	})
	r.TLS = &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{ca.Pair(t)},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return config.Load(), nil },
	}
	r.StartTLS()
	t.Cleanup(r.Close)
	files, err := tlsfile.Load(tlsfile.Names{Cert: cert, Key: key, CA: caFile})
	must(t, err)
	s := sender(t, r.URL, func(o *deliver.Options) { o.TLS = files })
	must(t, s.Handle(t.Context(), event("e", "a")))
	if protocol.Load() != "HTTP/2.0" {
		t.Errorf("protocol %v", protocol.Load())
	}
	testenv.Equal(t, "no CA", kind(sender(t, r.URL).Handle(t.Context(), event("e", "a"))), "unavailable")
	serve(next)
	next.Files(t, dir)
	r.CloseClientConnections()
	testenv.Eventually(t, 20*time.Second, func() error { return s.Handle(t.Context(), event("e", "a")) })
}

// consume runs a sender to url as a member of the group g until the test ends.
func consume(t *testing.T, r *testenv.RedisServer, url string, change ...func(o *consumer.Options)) {
	t.Helper()
	s := sender(t, url)
	o := consumer.Options{
		Client: r.Client, Group: "g", Streams: []string{stream}, Handler: s.Handle, MaxAttempts: 3,
		Backoff: func(int) time.Duration { return 5 * time.Millisecond },
		Logger:  slog.New(slog.NewTextHandler(checked{t}, nil)),
	}
	for _, c := range change {
		c(&o)
	}
	c, err := consumer.New(o)
	must(t, err)
	stop := testenv.Background(t, c.Run)
	t.Cleanup(func() { testenv.ErrorIs(t, "Run", stop(), nil) })
}

// fill adds n events of so many subjects to the stream. Their ids have a prefix.
func fill(t *testing.T, r *testenv.RedisServer, prefix string, n, subjects int) {
	t.Helper()
	for i := range n {
		ev := event(fmt.Sprintf("%s%d", prefix, i), fmt.Sprintf("s%d", i%subjects))
		must(t, r.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, Values: []any{
			"id", ev.ID, "type", ev.Type, "source", ev.Source, "subject", ev.Subject, "time",
			"2026-01-02T03:04:05.000000Z", "data", string(ev.Data), "traceparent", trace,
		}}).Err())
	}
}

// settled waits until the group has acknowledged everything.
func settled(t *testing.T, r *testenv.RedisServer) {
	t.Helper()
	testenv.Eventually(t, 30*time.Second, func() error {
		st, err := consumer.Inspect(t.Context(), r.Client, stream, "g")
		return errors.Join(err, testenv.FailIf(st.Lag != 0 || st.Pending != 0, "%+v", st))
	})
}

func dead(t *testing.T, r *testenv.RedisServer) []consumer.DeadEntry {
	t.Helper()
	list, err := consumer.Dead(t.Context(), r.Client, "outbox.")
	must(t, err)
	return list
}

// The receiver is slow, answers 429, 500 and 503, cuts connections, and is away for a time. It gets every event, in
// order per subject, several subjects at once, and no event is dead although there is a single attempt.
func TestOutagesKeepOrderAndEveryEvent(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{false, true} {
		t.Run(fmt.Sprintf("ordered=%v", ordered), func(t *testing.T) {
			t.Parallel()
			const n, subjects = 400, 7
			rd := testenv.Redis(t)
			var mu sync.Mutex
			running, parallel, tries := 0, 0, map[string]int{}
			bySubject, taken := map[string][]string{}, 0
			r := receive(t, func(w http.ResponseWriter, p post) {
				mu.Lock()
				running++
				parallel = max(parallel, running)
				tries[p.id()]++
				try := tries[p.id()]
				mu.Unlock()
				time.Sleep(time.Duration(len(p.id())) * time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				running--
				var k int
				_, _ = fmt.Sscanf(p.id(), "e%d", &k)
				if k%5 == 0 && try <= 4 {
					if k%10 == 0 && try == 1 {
						panic(http.ErrAbortHandler)
					}
					status([]int{408, 429, 500, 503}[try-1])(w, p)
					return
				}
				var e struct{ Subject string }
				_ = json.Unmarshal(p.body, &e)
				bySubject[e.Subject] = append(bySubject[e.Subject], p.id())
				taken++
			})
			proxy := testenv.NewLink(t, strings.TrimPrefix(r.URL, "http://"))
			proxy.Down()
			var failures atomic.Int64
			consume(t, rd, "http://"+proxy.Addr(), func(o *consumer.Options) {
				o.MaxAttempts, o.Ordered = 1, ordered
				send := o.Handler
				o.Handler = func(ctx context.Context, ev consumer.Event) error {
					err := send(ctx, ev)
					if err != nil {
						failures.Add(1)
					}
					return err
				}
			})
			fill(t, rd, "e", n, subjects)
			failed := func(more int64) {
				more += failures.Load()
				testenv.Eventually(t, 20*time.Second, func() error {
					got := failures.Load()
					return testenv.FailIf(got < more, "%d of %d failures", got, more)
				})
			}
			failed(5 * subjects)
			proxy.Up()
			testenv.Eventually(t, 20*time.Second, func() error {
				mu.Lock()
				defer mu.Unlock()
				return testenv.FailIf(taken < n/4, "%d events taken", taken)
			})
			proxy.Down()
			failed(5 * subjects)
			proxy.Up()
			settled(t, rd)
			testenv.Equal(t, "dead events", len(dead(t, rd)), 0)
			mu.Lock()
			defer mu.Unlock()
			if parallel < 2 || parallel > 8 {
				t.Errorf("%d requests at once", parallel)
			}
			for s := range subjects {
				var want []string
				for i := s; i < n; i += subjects {
					want = append(want, fmt.Sprintf("e%d", i))
				}
				// A request that was cut off may have been accepted: a repetition is then next to it.
				if got := slices.Compact(bySubject[fmt.Sprintf("s%d", s)]); !slices.Equal(got, want) {
					t.Errorf("subject s%d: %v, want %v", s, got, want)
				}
			}
		})
	}
}

// A few events that the receiver refuses die after their attempts, while those of other subjects are accepted. The
// events behind them are accepted then, and a retry brings them back.
func TestPoisonDies(t *testing.T) {
	t.Parallel()
	rd := testenv.Redis(t)
	var fixed atomic.Bool
	tries, accepted := sync.Map{}, sync.Map{}
	r := receive(t, func(w http.ResponseWriter, p post) {
		n, _ := tries.LoadOrStore(p.id(), new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		if strings.HasPrefix(p.id(), "poison") && !fixed.Load() {
			status(http.StatusUnprocessableEntity)(w, p)
			return
		}
		accepted.Store(p.id(), true)
	})
	fill(t, rd, "good", 60, 20)
	fill(t, rd, "poison", 3, 3)
	fill(t, rd, "behind", 60, 20)
	consume(t, rd, r.URL)
	settled(t, rd)
	list := dead(t, rd)
	if len(list) != 3 {
		t.Fatalf("%d events are dead, want 3: %+v", len(list), list)
	}
	for _, d := range list {
		n, _ := tries.Load(d.EventID)
		if !strings.HasPrefix(d.EventID, "poison") || d.Attempts != 3 || n.(*atomic.Int64).Load() < 3 ||
			d.Error != "the receiver answered 422 Unprocessable Entity" {
			t.Errorf("dead: %+v", d)
		}
	}
	for i := range 60 {
		if _, ok := accepted.Load(fmt.Sprintf("behind%d", i)); !ok {
			t.Errorf("behind%d was not accepted", i)
		}
	}
	fixed.Store(true)
	for _, d := range list {
		must(t, consumer.Retry(t.Context(), rd.Client, d))
	}
	testenv.Eventually(t, 60*time.Second, func() error {
		for i := range 3 {
			if _, ok := accepted.Load(fmt.Sprintf("poison%d", i)); !ok {
				return fmt.Errorf("poison%d was not accepted", i)
			}
		}
		return nil
	})
}

// While the receiver refuses everything, as with a wrong secret, no event dies.
func TestRefusalOfEverythingIsNotPoison(t *testing.T) {
	t.Parallel()
	rd := testenv.Redis(t)
	var fixed atomic.Bool
	r := receive(t, func(w http.ResponseWriter, p post) {
		if !fixed.Load() {
			status(http.StatusUnauthorized)(w, p)
		}
	})
	fill(t, rd, "e", 100, 25)
	consume(t, rd, r.URL)
	testenv.Eventually(t, 20*time.Second, func() error {
		n := len(r.got())
		return testenv.FailIf(n < 10*25, "%d requests", n)
	})
	fixed.Store(true)
	settled(t, rd)
	testenv.Equal(t, "dead events", len(dead(t, rd)), 0)
}

// After Retry-After, no request begins before that time, of any subject, and then all events are accepted.
func TestPauseIsKept(t *testing.T) {
	t.Parallel()
	rd := testenv.Redis(t)
	var mu sync.Mutex
	var until time.Time
	early := 0
	r := receive(t, func(w http.ResponseWriter, p post) {
		mu.Lock()
		defer mu.Unlock()
		if until.IsZero() {
			status(http.StatusTooManyRequests, "Retry-After", "2")(w, p)
			until = time.Now().Add(2 * time.Second)
		} else if time.Now().Before(until) {
			early++
		}
	})
	fill(t, rd, "e", 1, 1)
	var answers atomic.Int64 // that the sender has read
	consume(t, rd, r.URL, func(o *consumer.Options) {
		send := o.Handler
		o.Handler = func(ctx context.Context, ev consumer.Event) error {
			defer answers.Add(1)
			return send(ctx, ev)
		}
	})
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(answers.Load() == 0, "no answer")
	})
	fill(t, rd, "f", 50, 10)
	settled(t, rd)
	mu.Lock()
	defer mu.Unlock()
	testenv.Equal(t, "requests before the end of the pause", early, 0)
}

// The log has the beginning of an outage once, and what the receiver answered, and no text of the receiver.
func TestOutageIsLogged(t *testing.T) {
	t.Parallel()
	r := receive(t, status(http.StatusServiceUnavailable))
	var log bytes.Buffer
	reg := prometheus.NewPedanticRegistry()
	s := sender(t, r.URL, func(o *deliver.Options) {
		o.Registerer, o.Logger = reg, slog.New(slog.NewTextHandler(io.MultiWriter(&log, checked{t}), nil))
	})
	for range 100 {
		_ = s.Handle(t.Context(), event("e", "a"))
	}
	if n := strings.Count(log.String(), "\n"); n < 1 || n > 2 ||
		!strings.Contains(log.String(), "the receiver answered 503 Service Unavailable") {
		t.Errorf("%d lines: %s", n, log.String())
	}
	testenv.Equal(t, "series", testutil.CollectAndCount(reg, "outbox_deliver_seconds"), 5)
}
