package webhook_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"posthaste/consumer"
	"posthaste/examples/webhook"
	"posthaste/internal/testenv"
)

func TestMain(m *testing.M) {
	code := testenv.Main(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var secret = []byte("0123456789abcdef")

// transport returns a transport per test, so that its connections can be closed at the end.
func transport(tb testing.TB) *http.Transport {
	tr := &http.Transport{}
	tb.Cleanup(tr.CloseIdleConnections)
	return tr
}

// The warehouse refuses every first attempt and is down for a time: it gets every event, in order per subject, with a
// signature that it accepts.
func TestDeliversThroughTrouble(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	const n = 60
	for i := range n {
		err := r.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: "outbox.order", Values: []any{
			"id", fmt.Sprintf("e%d", i), "type", "order.created", "subject", fmt.Sprintf("s%d", i%4), "time",
			"2026-01-02T03:04:05.000000Z", "data", `{"a": 1}`,
		}}).Err()
		must(t, err)
	}
	var mu sync.Mutex
	seen := map[string]int{}
	bySubject := map[string][]string{}
	srv := httptest.NewServer(webhook.Receiver(secret, func(_ context.Context, d webhook.Delivery) error {
		mu.Lock()
		defer mu.Unlock()
		if seen[d.ID]++; seen[d.ID] == 1 {
			return errors.New("not now")
		}
		if d.Type != "order.created" || string(d.Data) != `{"a":1}` || d.Time.Year() != 2026 {
			t.Errorf("got %+v", d)
		}
		bySubject[d.Subject] = append(bySubject[d.Subject], d.ID)
		return nil
	}))
	defer srv.Close()
	p := testenv.NewProxy(t, strings.TrimPrefix(srv.URL, "http://"))
	p.Down()
	h, err := webhook.Handler("http://"+p.Addr(), secret, transport(t))
	must(t, err)
	refused := make(chan struct{}, 1)
	c, err := consumer.New(consumer.Options{
		// outages do not count as attempts
		Client: r.Client, Group: webhook.Group, Streams: []string{"outbox.order"}, MaxAttempts: 1,
		Backoff: func(int) time.Duration { return 5 * time.Millisecond },
		Handler: func(ctx context.Context, ev consumer.Event) error {
			err := h(ctx, ev)
			if err != nil {
				select {
				case refused <- struct{}{}:
				default:
				}
			}
			return err
		},
	})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	<-refused
	p.Up()
	testenv.Eventually(t, 20*time.Second, func() error {
		st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", webhook.Group)
		if err == nil && (st.Lag != 0 || st.Pending != 0) {
			err = fmt.Errorf("%+v", st)
		}
		return err
	})
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
	for s := range 4 {
		var want []string
		for i := s; i < n; i += 4 {
			want = append(want, fmt.Sprintf("e%d", i))
		}
		if got := bySubject[fmt.Sprintf("s%d", s)]; fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("subject s%d: %v, want %v", s, got, want)
		}
	}
}

func TestAnswersAreJudged(t *testing.T) {
	t.Parallel()
	type verdict struct{ unavailable, permanent bool }
	for status, want := range map[int]*verdict{
		200: nil, 204: nil, 301: {permanent: true}, 400: {permanent: true}, 401: {permanent: true},
		410: {permanent: true},
		408: {unavailable: true}, 429: {unavailable: true}, 500: {}, 502: {unavailable: true}, 503: {unavailable: true},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(status)
		}))
		h, err := webhook.Handler(srv.URL, secret, transport(t))
		must(t, err)
		err = h(t.Context(), consumer.Event{ID: "e", Data: []byte("{}")})
		var got *verdict
		if err != nil {
			var u interface{ Unavailable() bool }
			var p interface{ Permanent() bool }
			got = &verdict{errors.As(err, &u), errors.As(err, &p)}
		}
		if (got == nil) != (want == nil) || (got != nil && *got != *want) {
			t.Errorf("status %d: %+v (%v), want %+v", status, got, err, want)
		}
		srv.Close()
	}
}

func TestReceiverRefusesWhatIsNotSigned(t *testing.T) {
	t.Parallel()
	accepted := 0
	rcv := webhook.Receiver(secret, func(context.Context, webhook.Delivery) error { accepted++; return nil })
	var good *http.Request
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		good = httptest.NewRequestWithContext(context.WithoutCancel(r.Context()), http.MethodPost, "/",
			strings.NewReader(string(body)))
		good.Header = r.Header.Clone()
	}))
	defer srv.Close()
	h, err := webhook.Handler(srv.URL, secret, transport(t))
	must(t, err)
	must(t, h(t.Context(), consumer.Event{ID: "e", Type: "t", Data: []byte(`{"a":1}`)}))
	body, _ := io.ReadAll(good.Body)
	sent, err := strconv.ParseInt(good.Header.Get("Webhook-Timestamp"), 10, 64)
	must(t, err)
	try := func(body string, change func(h http.Header)) int {
		req := good.Clone(t.Context())
		req.Body = io.NopCloser(strings.NewReader(body))
		change(req.Header)
		w := httptest.NewRecorder()
		rcv.ServeHTTP(w, req)
		return w.Code
	}
	for name, c := range map[string]struct {
		body   string
		change func(h http.Header)
		want   int
	}{
		"as sent": {string(body), func(http.Header) {}, 204},
		"two signatures": {string(body), func(h http.Header) {
			h.Set("Webhook-Signature", "v1,AAAA "+
				h.Get("Webhook-Signature"))
		}, 204},
		"other body":   {strings.Replace(string(body), "1", "2", 1), func(http.Header) {}, 401},
		"other id":     {string(body), func(h http.Header) { h.Set("Webhook-Id", "f") }, 401},
		"other time":   {string(body), func(h http.Header) { h.Set("Webhook-Timestamp", fmt.Sprint(sent-1)) }, 401},
		"no time":      {string(body), func(h http.Header) { h.Del("Webhook-Timestamp") }, 401},
		"no signature": {string(body), func(h http.Header) { h.Del("Webhook-Signature") }, 401},
		"other signature": {string(body), func(h http.Header) {
			h.Set("Webhook-Signature", "v1,"+
				strings.Repeat("A", 44))
		}, 401},
	} {
		if got := try(c.body, c.change); got != c.want {
			t.Errorf("%s: status %d, want %d", name, got, c.want)
		}
	}
	if accepted != 2 {
		t.Errorf("%d requests accepted, want 2", accepted)
	}
	for _, bad := range []func() error{
		func() error { _, err := webhook.Handler("ftp://x", secret, nil); return err },
		func() error { _, err := webhook.Handler("http://x", []byte("short"), nil); return err },
	} {
		if bad() == nil {
			t.Error("a bad setting was accepted")
		}
	}
}

var must = testenv.Must
