package main

import (
	"context"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// TestScrapesNeverWait checks that every scrape is answered while neither Postgres nor Redis responds and connections
// hang.
func TestScrapesNeverWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	servers := []*testenv.Link{testenv.NewLink(t, hostOf(t, w.pgURL)), testenv.NewLink(t, hostOf(t, w.rdURL))}
	w.pgURL = strings.Replace(w.pgURL, hostOf(t, w.pgURL), servers[0].Addr(), 1)
	w.rdURL = strings.Replace(w.rdURL, hostOf(t, w.rdURL), servers[1].Addr(), 1)
	relay, api, consume := w.spawn("relay"), w.spawn("serve"), w.spawn("consume", "--group=g")
	w.waitMode("cdc", 20*time.Second)
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
