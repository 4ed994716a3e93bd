package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

func TestOneLargeTransaction(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.relayIn(mode, "--log-level=info")
		load := testenv.Bulk(t, w.db, 15_000, 40)
		w.oracle.Check(t, load, 60*time.Second)
	})
}

// The window limits the events that are published and not settled. The exception is the rest of a transaction, of which
// no event is kept in memory after it is published.
func TestTheWindowBoundsWhatIsInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc", "--window=100", "--log-level=info")
	peak := r.peakGauge(t, "outbox_inflight_events")
	load := w.wrote(testenv.LoadOptions{Total: 3000})
	w.oracle.Check(t, load, 60*time.Second)
	if n := peak(); n < 50 || n > 102 { // three events per transaction
		t.Errorf("%v events in flight, the window is 100", n)
	}
}

func TestLargeEventsAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--window-bytes=8MiB", "--log-level=info")
		events := scale(64, 24)
		if mode == "poll" {
			w.oracle.Check(t, testenv.Bulk(t, w.db, events, 1<<20), 60*time.Second)
			return
		}
		do(t, w.redis.Client, "client", "pause", 60_000, "write") // Redis takes no event
		const inFlight = "outbox_inflight_events"
		peak := r.peakGauge(t, inFlight)
		load := testenv.Bulk(t, w.db, events, 1<<20)
		testenv.Eventually(t, 20*time.Second, func() error {
			return testenv.FailIf(r.value(inFlight) == 0, "no event is in flight")
		})
		wait(t, 300*time.Millisecond)
		// An event of 1 MiB counts with about 300 additional bytes, so seven fit.
		if n := peak(); n > 7 {
			t.Errorf("%v events of 1 MiB in flight, the window is 8 MiB", n)
		}
		do(t, w.redis.Client, "client", "unpause")
		w.oracle.Check(t, load, 60*time.Second)
	})
}

// peakOf samples what read returns, until the returned function is called. That function returns the largest sample.
func peakOf(t *testing.T, every time.Duration, read func(ctx context.Context) (float64, error)) func() float64 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan float64, 1)
	go func() {
		peak := 0.0
		for pause.For(ctx, every) == nil {
			if v, err := read(ctx); err == nil {
				peak = max(peak, v)
			}
		}
		done <- peak
	}()
	return func() float64 { cancel(); return <-done }
}

// peakGauge samples a gauge of the child as fast as the child responds.
func (c *child) peakGauge(t *testing.T, name string) func() float64 {
	t.Helper()
	return peakOf(t, 5*time.Millisecond, func(context.Context) (float64, error) {
		text, err := c.metrics()
		v, _ := sample(text, name)
		return v, err
	})
}

// retained samples the WAL that the slot retains.
func (w *world) retained() func() float64 {
	w.t.Helper()
	return peakOf(w.t, 100*time.Millisecond, func(ctx context.Context) (n float64, err error) {
		err = w.db.Pool.QueryRow(ctx, `SELECT coalesce(max(pg_current_wal_lsn() - restart_lsn), 0)::float8
			FROM pg_replication_slots WHERE slot_name = $1`, "posthaste_"+w.db.Relay).Scan(&n)
		return n, err
	})
}

// churn writes WAL unrelated to the outbox, at a rate in bytes per second, until the test ends. It counts the bytes
// written.
func churn(t *testing.T, url string, rate int) *atomic.Int64 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := pgx.Connect(ctx, url)
	must(t, err)
	if _, err := c.Exec(ctx,
		"CREATE TABLE churn (b bytea); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL"); err != nil {
		t.Fatal(err)
	}
	written, done := &atomic.Int64{}, make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		defer func() { _ = c.Close(context.Background()) }()
		const each = 50 * time.Millisecond
		block := make([]byte, rate/int(time.Second/each))
		for pause.Tick(ctx, each) == nil {
			if _, err := c.Exec(ctx, "INSERT INTO churn VALUES ($1)", block); err == nil {
				written.Add(int64(len(block)))
			}
		}
	}()
	return written
}

// settleSlack is how much may be written beyond the budget in one settle interval, here a second. The relay checks the
// slot four times a second, and needs the rest of the interval to leave the stream and to move or drop the slot. The
// tests write at most 12 MB/s of events. The WAL of an event with its index entry and page headers is about a quarter
// larger.
const settleSlack = 16 << 20

// Events are written while Redis is down. The slot keeps the budget.
func TestWALBudgetWithRedisDown(t *testing.T) {
	t.Parallel()
	budget, total := scale(32<<20, 16<<20), scale(150_000_000, 36_000_000)
	w, _ := onServer(t)
	r := w.relayIn("cdc", fmt.Sprintf("--wal-budget=%d", budget), "--log-level=info")
	warm := w.wrote(testenv.LoadOptions{Total: 60})
	w.oracle.WaitEmpty(t, 20*time.Second)
	must(t, w.redis.Kill())
	w.oracle.Others = []*testenv.Load{warm}
	peak := w.retained()
	const pad = 30_000
	began := time.Now()
	load := w.wrote(testenv.LoadOptions{Total: total / pad, Rate: 200, Pad: pad, Tag: "down-"})
	rate := float64(total) / time.Since(began).Seconds() / 1e6
	wait(t, time.Second)
	held := peak()
	t.Logf("retained at most %.1f MiB of a budget of %d MiB while %d MB of events were written at %.1f MB/s with "+
		"Redis down", held/(1<<20), budget>>20, total/1e6, rate)
	if held > float64(budget+settleSlack) {
		t.Errorf("the slot held back %.0f bytes", held)
	}
	if held < float64(budget)/4 {
		t.Errorf("the slot held back only %.0f bytes: nothing was tested", held)
	}
	if !r.logged(`"reason":"budget"`) {
		t.Error("the relay did not leave the stream because of its budget")
	}
	must(t, w.redis.Start(t.Context()))
	w.oracle.Check(t, load, 60*time.Second)
	w.waitMode("cdc")
}

// Other tables are written while the outbox is idle. The bound allows them three seconds more than the relay needs,
// because other tests run concurrently, also with full counts.
func TestIdleOutboxBesideABusyTable(t *testing.T) {
	t.Parallel()
	rate, lasting, bound := scale(2<<20, 4<<20), scale(45*time.Second, 5*time.Second), scale(38<<20, 45<<20)
	inModes(t, func(t *testing.T, mode string) {
		w, _ := onServer(t)
		w.relayIn("cdc", "--log-level=info") // also in poll mode, so that the slot exists
		if mode == "poll" {
			w.desire("poll")
			w.waitMode("poll")
		}
		written := churn(t, w.db.URL, rate)
		peak := w.retained()
		began := time.Now()
		testenv.Eventually(t, lasting+2*time.Minute, func() error {
			n := written.Load()
			return testenv.FailIf(n < 60<<20 || time.Since(began) < lasting, "%d bytes are written", n)
		})
		held := peak()
		t.Logf("retained at most %.1f MiB while other tables wrote %.1f MiB in %v", held/(1<<20),
			float64(written.Load())/(1<<20), time.Since(began).Round(time.Second))
		if held > float64(bound) {
			t.Errorf("an idle outbox holds back %.0f bytes", held)
		}
	})
}

func TestOpenTransactionElsewhereCostsTheSlotNotTheDisk(t *testing.T) {
	t.Parallel()
	const budget = 16 << 20
	w, server := onServer(t)
	other := server.Database(t)
	r := w.relayIn("cdc", fmt.Sprintf("--wal-budget=%d", budget), "--log-level=info")
	// The transaction must have written something: the decoder sees no other transactions.
	tx := worldOf(t, other, w.redis).begin("CREATE TABLE held ()")
	peak := w.retained()
	written := churn(t, other.URL, 4<<20)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
	r.waitLogged("dropping it")
	// Events are published without the slot.
	want := load.Committed() + 200
	w.waitLen("outbox.order", int64(want))
	held := peak()
	t.Logf("retained at most %.1f MiB beside an open transaction and %.1f MiB of other WAL", held/(1<<20),
		float64(written.Load())/(1<<20))
	if held > budget+settleSlack {
		t.Errorf("the slot held back %.0f bytes", held)
	}
	must(t, tx.Rollback(t.Context()))
	w.waitMode("cdc")
	w.ended(load)
}
