package webhook_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"posthaste/consumer"
	"posthaste/examples/webhook"
	"posthaste/internal/deliver"
	"posthaste/internal/lab/testenv"
)

var must = testenv.Must

func secretOf(key string) string { return "whsec_" + base64.StdEncoding.EncodeToString([]byte(key)) }

var (
	oldSecret, newSecret = secretOf("an old secret, 16+"), secretOf("a new secret, 16 +")
	order                = consumer.Event{
		ID: "e", Type: "order.created", Source: "/posthaste/default", Subject: "s", Data: []byte(`{"a":1}`),
		Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
)

// send sends an event as posthaste deliver does, signed with the secrets.
func send(t *testing.T, url string, ev consumer.Event, secrets ...string) error {
	t.Helper()
	file := testenv.WriteFile(t, t.TempDir(), "secrets", []byte(strings.Join(secrets, "\n")))
	s, err := deliver.New(deliver.Options{Group: "g", To: url, SecretFile: file, Timeout: time.Minute})
	must(t, err)
	return s.Handle(t.Context(), ev)
}

func TestReceiverAcceptsEachEventOnce(t *testing.T) {
	t.Parallel()
	var got []webhook.Event
	failures := 1
	r, err := webhook.New([]string{newSecret, oldSecret}, func(_ context.Context, ev webhook.Event) error {
		if failures > 0 {
			failures--
			return errors.New("not now")
		}
		got = append(got, ev)
		return nil
	})
	must(t, err)
	srv := httptest.NewServer(r)
	defer srv.Close()
	if err := send(t, srv.URL, order, oldSecret); err == nil {
		t.Error("an event that was not accepted is acknowledged")
	}
	must(t, send(t, srv.URL, order, oldSecret))
	must(t, send(t, srv.URL, order, newSecret))
	must(t, send(t, srv.URL, order, secretOf("not of this receiver"), newSecret))
	if len(got) != 1 || got[0].ID != "e" || got[0].Type != order.Type || got[0].Source != order.Source ||
		got[0].Subject != "s" || !got[0].Time.Equal(order.Time) || string(got[0].Data) != `{"a":1}` {
		t.Errorf("accepted %+v", got)
	}
	if err := send(t, srv.URL, order, secretOf("not of this receiver")); err == nil {
		t.Error("a request with an unknown secret is accepted")
	}
}

func TestReceiverRefusesWhatIsNotSigned(t *testing.T) {
	t.Parallel()
	accepted := 0
	r, err := webhook.New([]string{newSecret}, func(context.Context, webhook.Event) error { accepted++; return nil })
	must(t, err)
	var sent *http.Request
	var body []byte
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		sent = req
		body, _ = io.ReadAll(req.Body)
	}))
	defer srv.Close()
	must(t, send(t, srv.URL, order, newSecret))
	stamp, err := strconv.ParseInt(sent.Header.Get("Webhook-Timestamp"), 10, 64)
	must(t, err)
	for name, c := range map[string]struct {
		change func(h http.Header)
		body   []byte
		want   int
	}{
		"as sent":      {func(http.Header) {}, body, 204},
		"other body":   {func(http.Header) {}, bytes.Replace(body, []byte("1"), []byte("2"), 1), 401},
		"other id":     {func(h http.Header) { h.Set("Webhook-Id", "f") }, body, 401},
		"other time":   {func(h http.Header) { h.Set("Webhook-Timestamp", strconv.FormatInt(stamp-1, 10)) }, body, 401},
		"no time":      {func(h http.Header) { h.Del("Webhook-Timestamp") }, body, 401},
		"no signature": {func(h http.Header) { h.Del("Webhook-Signature") }, body, 401},
		"too large":    {func(http.Header) {}, make([]byte, 10<<20), 413},
	} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", bytes.NewReader(c.body))
		req.Header = sent.Header.Clone()
		c.change(req.Header)
		w := httptest.NewRecorder()
		if r.ServeHTTP(w, req); w.Code != c.want {
			t.Errorf("%s: status %d, want %d", name, w.Code, c.want)
		}
	}
	if accepted != 1 {
		t.Errorf("%d requests accepted, want 1", accepted)
	}
	for _, bad := range []string{"", "short", secretOf("short"), "whsec_" + strings.Repeat("!", 32)} {
		if _, err := webhook.New([]string{bad}, nil); err == nil {
			t.Errorf("secret %q was taken", bad)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }
