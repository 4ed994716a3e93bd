//go:build full

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

// These tests limit memory and time. They run one after the other, on an otherwise idle machine, without the race
// detector: make test-full.

// residentBound is the limit of a relay's resident memory, however many events arrive at once.
const residentBound = 256 << 20

// bounded returns the largest resident memory of a relay so far, and fails if it is too large.
func (c *child) bounded(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	must(t, err)
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	must(t, err)
	peak := kb << 10
	if peak > residentBound {
		t.Errorf("resident memory reached %d bytes", peak)
	}
	return peak
}

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
	peak := r.bounded(t)
	t.Logf("%s: %d events with %d bytes in %v (%.0f/s); resident at most %.0f MiB", mode, n, pad,
		took.Round(time.Millisecond), float64(n)/took.Seconds(), float64(peak)/(1<<20))
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
	peak := r.bounded(t)
	t.Logf("%d events were restored in %v (%.0f/s); resident at most %.0f MiB", events, took.Round(time.Millisecond),
		events/took.Seconds(), float64(peak)/(1<<20))
	w.oracle.Check(t, load, time.Minute)
	// The relay is killed while nothing is missing. The next one reads everything and publishes nothing.
	r.kill()
	do(t, w.redis.Client, "del", w.gate("outbox.order"))
	began = time.Now()
	r = w.spawn("relay", "--log-level=info", "--stream-maxlen=0")
	whole()
	peak = r.bounded(t)
	t.Logf("compared with the stream in %v; resident at most %.0f MiB", time.Since(began).Round(time.Millisecond),
		float64(peak)/(1<<20))
	w.oracle.Check(t, load, time.Minute)
}

// Of 64 streams one refuses everything, one is on a node that is down, and one on a node that is frozen now and then.
// The others are published under load, also while relays are killed and the mode is switched. In the end no stream has
// lost, repeated or reordered an event. The log has how late the 61 others were.
func TestFullSixtyFourStreams(t *testing.T) {
	w := newCluster(t, testenv.Cluster(t, 4, 0, "cluster-require-full-coverage no", "cluster-node-timeout 5000"))
	w.types = nil
	const refuses, down, slow = 1, 0, 3 // the nodes
	var others []string
	special := map[int]string{}
	for i := 0; len(others) < 61 || len(special) < 3; i++ {
		typ := fmt.Sprintf("t%d", i)
		node := w.cluster.Master(t, w.cluster.Slot(t, "outbox."+typ))
		switch {
		case special[node] == "" && (node == refuses || node == down || node == slow):
			special[node] = typ
			w.types = append(w.types, typ)
		case node != down && node != slow && len(others) < 61:
			others = append(others, typ)
			w.types = append(w.types, typ)
		}
	}
	r := w.relayIn("cdc", "--stream-maxlen=0")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 400, Types: w.types, Aggregates: 256, Writers: 8})
	w.flows(load, 400)
	calm := time.Now()
	w.flows(load, 4000)

	trouble := time.Now()
	refusing := "outbox." + special[refuses]
	c := w.cluster.Client
	must(t, c.Do(t.Context(), "XSETID", refusing, "18446744073709551615-18446744073709551615").Err())
	must(t, w.cluster.Nodes[down].Kill())
	ctx, mended := context.WithCancel(t.Context())
	pulses := make(chan struct{})
	go func() {
		defer close(pulses)
		for ctx.Err() == nil {
			_ = w.cluster.Nodes[slow].Signal(syscall.SIGSTOP)
			pause.For(ctx, 400*time.Millisecond)
			_ = w.cluster.Nodes[slow].Signal(syscall.SIGCONT)
			pause.For(ctx, 200*time.Millisecond)
		}
	}()
	published := func() (n int64) {
		for _, typ := range others {
			n += c.XLen(t.Context(), "outbox."+typ).Val()
		}
		return n
	}
	progress := func() {
		t.Helper()
		before := published()
		testenv.Eventually(t, 60*time.Second, func() error {
			now := published()
			return testenv.FailIf(now < before+1500, "%d events of the others are published, and were %d: %s", now,
				before, w.once("status").out)
		})
	}
	progress()
	// An adoption waits for a node that is down, so the kills come after it is back.
	must(t, w.cluster.Nodes[down].Start(t.Context()))
	late := time.Now()
	for _, mode := range []string{"poll", "cdc", "poll", "auto"} {
		r.kill()
		r = w.spawn("relay", "--stream-maxlen=0")
		r.setMode(mode)
		progress()
	}
	mended()
	<-pulses
	must(t, c.Do(t.Context(), "XSETID", refusing, c.XRevRangeN(t.Context(), refusing, "+", "-", 1).Val()[0].ID).Err())
	w.ended(load)
	t.Logf("p99 of 61 streams: calm %v; three in trouble %v; relays killed and the mode switched as well %v",
		w.p99(others, calm, trouble), w.p99(others, trouble, late), w.p99(others, late, time.Now()))
}

// p99 returns the time from the insert to the entry, in milliseconds, of the events that were inserted in an interval.
func (w *clustered) p99(types []string, from, to time.Time) int64 {
	w.t.Helper()
	var all []int64
	for _, typ := range types {
		for _, e := range w.cluster.Client.XRange(w.t.Context(), "outbox."+typ, "-", "+").Val() {
			text, _ := e.Values["time"].(string)
			at, err := time.Parse(time.RFC3339Nano, text)
			must(w.t, err)
			ms, err := strconv.ParseInt(strings.SplitN(e.ID, "-", 2)[0], 10, 64)
			must(w.t, err)
			if at.After(from) && at.Before(to) {
				all = append(all, ms-at.UnixMilli())
			}
		}
	}
	slices.Sort(all)
	return all[len(all)*99/100]
}
