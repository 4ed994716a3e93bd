//go:build full

package main

import (
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// These tests limit memory and time. They run one after the other, on an otherwise idle machine, without the race
// detector: make test-full.

// residentBound is the limit of a relay's resident memory, however many events arrive at once.
const residentBound = 256 << 20

// bulkIn sends n events of one transaction through a relay and measures its memory. A sweeping relay starts after the
// events are written, a streaming relay before.
func bulkIn(t *testing.T, mode string, n, pad int) {
	t.Helper()
	w := newWorld(t)
	var r *child
	var load *testenv.Load
	var began time.Time
	if mode == "poll" {
		w.desire("poll")
		load = testenv.Bulk(t, w.db, n, pad)
		began = time.Now()
		r = w.spawn("relay", "--log-level=info")
	} else {
		r = w.relayIn("cdc", "--log-level=info")
		load = testenv.Bulk(t, w.db, n, pad)
		began = time.Now()
	}
	w.oracle.WaitEmpty(t, 10*time.Minute)
	took := time.Since(began)
	peak := r.memory(t, "VmHWM")
	t.Logf("%s: %d events with %d bytes in %v (%.0f/s); resident at most %.0f MiB", mode, n, pad,
		took.Round(time.Millisecond), float64(n)/took.Seconds(), float64(peak)/(1<<20))
	if peak > residentBound {
		t.Errorf("resident memory reached %d bytes", peak)
	}
	w.oracle.Check(t, load, time.Minute)
}

func TestFullOneTransactionOf300000Events(t *testing.T) {
	for _, mode := range []string{"cdc", "poll"} {
		t.Run(mode, func(t *testing.T) { bulkIn(t, mode, 300_000, 40) })
	}
}

func TestFullLargeEvents(t *testing.T) {
	for _, mode := range []string{"cdc", "poll"} {
		t.Run(mode, func(t *testing.T) { bulkIn(t, mode, 64, 1<<20) })
	}
}

// Redis is emptied under a relay that has settled a million events. The relay restores them to their stream, with
// limited memory.
func TestFullAMillionEventsAreRestored(t *testing.T) {
	const events = 1_000_000
	w := newWorld(t)
	r := w.relayIn("cdc", "--log-level=info", "--stream-maxlen=0")
	load := testenv.Bulk(t, w.db, events, 40)
	w.oracle.WaitEmpty(t, 10*time.Minute)
	whole := func() {
		t.Helper()
		testenv.Eventually(t, 10*time.Minute, func() error {
			return testenv.FailIf(!r.logged("the stream is whole again"), "the stream is not whole yet")
		})
	}
	began := time.Now()
	do(t, w.redis.Client, "flushall")
	whole()
	took := time.Since(began)
	peak := r.memory(t, "VmHWM")
	t.Logf("%d events were restored in %v (%.0f/s); resident at most %.0f MiB", events, took.Round(time.Millisecond),
		events/took.Seconds(), float64(peak)/(1<<20))
	if peak > residentBound {
		t.Errorf("resident memory reached %d bytes", peak)
	}
	w.oracle.Check(t, load, time.Minute)
	// The relay is killed while nothing is missing. The next one reads everything and publishes nothing.
	r.kill()
	do(t, w.redis.Client, "del", w.gate("outbox.order"))
	began = time.Now()
	r = w.spawn("relay", "--log-level=info", "--stream-maxlen=0")
	whole()
	peak = r.memory(t, "VmHWM")
	t.Logf("compared with the stream in %v; resident at most %.0f MiB", time.Since(began).Round(time.Millisecond),
		float64(peak)/(1<<20))
	if peak > residentBound {
		t.Errorf("resident memory reached %d bytes", peak)
	}
	w.oracle.Check(t, load, time.Minute)
}
