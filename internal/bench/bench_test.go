package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/cli"
	"posthaste/internal/lab/testenv"
)

func TestCheckHolds(t *testing.T) {
	t.Parallel()
	good := check{Committed: 3, Found: 3, Recorded: 3, Replayed: 1}
	if !good.holds() {
		t.Errorf("%+v does not hold", good)
	}
	for _, bad := range []check{{Lost: 1}, {Repeated: 1}, {Unknown: 1}, {Committed: 1}, {Found: 1}, {Recorded: -1}} {
		sum := good
		sum.add(bad)
		if sum.holds() {
			t.Errorf("%+v holds", sum)
		}
		r := report{Results: []*row{{Check: &sum}}}
		err := r.finish(cli.IO{Stdout: &bytes.Buffer{}}, true)
		testenv.ErrorIs(t, fmt.Sprintf("a report with %+v", sum), err, ErrFound)
	}
}

// TestLoadKeepsItsTimetable stalls one call: the other calls keep their due times, and their durations count from
// those.
func TestLoadKeepsItsTimetable(t *testing.T) {
	t.Parallel()
	const stall = 200 * time.Millisecond
	var due []time.Time
	took, calls, err := load{
		workers: 1, rate: 100, lasts: 100 * time.Millisecond,
		do: func(_ context.Context, n int, at time.Time) error {
			if n == 0 {
				<-time.After(stall)
			}
			due = append(due, at)
			return nil
		},
	}.run(t.Context())
	if err != nil || calls != 10 || len(took) != 10 {
		t.Fatalf("%d calls, %d counted, %v; want 10", calls, len(took), err)
	}
	for n := range due {
		late := time.Duration(n) * 10 * time.Millisecond
		if due[n].Sub(due[0]) != late || took[n] < stall-late {
			t.Errorf("call %d was due %v after the first and took %v; want %v, and at least %v", n, due[n].Sub(due[0]),
				took[n],
				late, stall-late)
		}
	}
}

// TestLoadCountsACall: a benchmark has a figure even if each call takes longer than its whole duration.
func TestLoadCountsACall(t *testing.T) {
	t.Parallel()
	const lasts = 10 * time.Millisecond
	took, calls, err := load{
		workers: 2, warm: lasts, lasts: lasts,
		do: func(_ context.Context, n int, _ time.Time) error {
			if n < 2 {
				<-time.After(3 * lasts)
			}
			return nil
		},
	}.run(t.Context())
	if err != nil || len(took) == 0 || calls < len(took) {
		t.Errorf("%d calls, %d counted, %v", calls, len(took), err)
	}
}

func TestFigures(t *testing.T) {
	t.Parallel()
	r := &report{}
	w := r.result("r", "")
	for _, v := range []float64{9, 1, 4, 2} {
		w.is("per_second", v)
	}
	if f := w.Figures["per_second"]; f.Median != 3 || f.Min != 1 || f.Max != 9 {
		t.Errorf("median, least and most are %+v", *f)
	}
	var took []time.Duration
	for n := range 100 {
		took = append(took, time.Duration(100-n)*time.Millisecond)
	}
	w.spread(took)
	for name, want := range map[string]float64{"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "max_ms": 100} {
		testenv.Equal(t, name, w.median(name), want)
	}
	r.limit("a", "").is("per_second", 6)
	r.limit("b", "").is("per_second", 3)
	if lowest := r.against(w, "per_second", "a", "b"); lowest != "b" || w.Ratios["a"] != 0.5 || w.Ratios["b"] != 1 ||
		w.Ratios[together] != 1.5 {
		t.Errorf("lowest %s, ratios %v", lowest, w.Ratios)
	}
}

func TestEventsHaveNumbers(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, 255, 256, 1 << 40} {
		if got, ok := eventNumber(eventID(n).String()); !ok || got != n {
			t.Errorf("event %d has number %d, %v", n, got, ok)
		}
	}
	for _, id := range []string{"", "x", uuid.NewString(), strings.Repeat("f", 36)} {
		if n, ok := eventNumber(id); ok {
			t.Errorf("%q is event %d", id, n)
		}
	}
	for _, size := range []int{16, 300, 5000} {
		if p := payloadOf(size); len(p) != size || !json.Valid([]byte(p)) {
			t.Errorf("a payload of %d bytes has %d: %s", size, len(p), p)
		}
	}
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/db?sslmode=disable&dbname=x": "postgres://u:p@h:1/b?sslmode=disable",
		"host=h dbname=db": "host=h dbname=db dbname=b", "": " dbname=b",
	} {
		testenv.Equal(t, dsn+" in another database", inDatabase(dsn, "b"), want)
	}
}

// The inserts of the same table and round are subtracted from what a peer costs.
func TestTax(t *testing.T) {
	t.Parallel()
	run := func(Place) []string { return nil }
	own, other := &Table{}, &Table{Insert: "other"}
	c := Peers{Peers: []Peer{
		{Name: "none", Table: own},
		{Name: "posthaste", Table: own, Command: run},
		{Name: "none (other)", Table: other},
		{Name: "other", Table: other, Command: run},
	}}
	r := &report{}
	for range 2 {
		found := map[string]figures{
			"none":         {"per_second": 200, "postgres_cpu_us": 50},
			"posthaste":    {"per_second": 100, "postgres_cpu_us": 70, "relay_cpu_us": 5, "redis_cpu_us": 2},
			"none (other)": {"per_second": 100, "postgres_cpu_us": 30},
			"other":        {"per_second": 100, "postgres_cpu_us": 70, "relay_cpu_us": 1, "missing": 200},
		}
		for _, f := range found {
			f["written"] = 400
		}
		c.note(r, peerLoad{name: "100/s"}, found)
	}
	for i, want := range []float64{27, 11} { // the latter paid for 400 inserts
		w := r.Results[i]
		if f := w.Figures["tax_us"]; len(f.Runs) != 2 || math.Abs(f.Median-want) > 1e-9 {
			t.Errorf("the tax of %s is %+v, want %v", w.Name, *f, want)
		}
	}
	if of := r.Results[0].median("of_none_percent"); len(r.Limits) != 2 || of != 50 {
		t.Errorf("%d loads alone, and inserts at %v %% of their rate", len(r.Limits), of)
	}
}

func TestWrittenAt(t *testing.T) {
	t.Parallel()
	want := time.Unix(0, 1_700_000_000_123_456_000)
	for field, text := range map[string]string{
		"data": `{"at": 1700000000123456000, "pad": "x"}`, "payload": `{"at": 1700000000123456000, "pad": "x"}`,
	} {
		if got := writtenAt(map[string]any{field: text}); !got.Equal(want) {
			t.Errorf("%s %s was written at %v", field, text, got)
		}
	}
}
