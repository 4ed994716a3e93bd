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
	present(t, consume, `outbox_consumer_attempts_total{group="g",outcome="done"} 1`)
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

func TestMetricsOfTheContractExistFromTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r, api := w.spawn("relay"), w.spawn("serve")
	// Series with fixed labels exist from the start.
	present(t, r,
		"outbox_parked_total", "outbox_publish_seconds_count", "outbox_backlog_rows", "outbox_backlog_oldest_seconds",
		"outbox_inflight_events",
		`outbox_relay_mode{mode="cdc"}`, `outbox_relay_mode{mode="poll"}`, `outbox_relay_mode{mode="standby"}`,
		"outbox_relay_leader", "outbox_relay_epoch",
		`outbox_relay_desired_mode{mode="auto"} 1`, `outbox_relay_desired_mode{mode="poll"} 0`,
		`outbox_mode_switches_total{from="poll",reason="toggle",to="cdc"}`,
		`outbox_mode_switches_total{from="cdc",reason="budget",to="poll"}`,
		`outbox_commit_to_publish_seconds_count{mode="cdc"}`, `outbox_commit_to_publish_seconds_count{mode="poll"}`,
		"outbox_slot_active", "outbox_slot_retained_bytes", "outbox_slot_confirmed_lag_bytes", "outbox_slot_lost",
		"outbox_slot_max_keep_bytes",
		"outbox_wire_idle_seconds", `outbox_scrape_errors_total{collector="slot"}`, `outbox_suppressed_total{`,
		`outbox_publish_errors_total{`,
		"redis_memory_ratio", "redis_eviction_unsafe", "go_sched_gomaxprocs_threads 1")
	present(t, api, `idem_requests_total{`, `idem_script_seconds_count{`)
	w.waitMode("cdc", 20*time.Second)
	if a, err := placeOrder(t.Context(), api.http, 7); err != nil || a.status != http.StatusCreated {
		t.Fatalf("order: %d, %v", a.status, err)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	// The labels of other series are the names of streams, groups, types and routes, so the series appear with them.
	must(t, w.redis.Client.XGroupCreate(t.Context(), "outbox.order", "g", "0").Err())
	present(t, r, `outbox_published_total{mode="cdc",stream="outbox.order"}`,
		`outbox_stream_length{stream="outbox.order"}`,
		`outbox_group_pending{group="g",stream="outbox.order"}`, `outbox_group_lag{group="g",stream="outbox.order"}`,
		`outbox_group_oldest_pending_seconds{group="g",stream="outbox.order"}`,
		`outbox_trim_lost_total{group="g",stream="outbox.order"}`)
	present(t, api, `outbox_events_written_total{type="order.created"}`,
		`http_request_duration_seconds_count{method="POST",route="/orders",status="201"}`)
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
