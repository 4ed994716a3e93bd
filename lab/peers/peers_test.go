package main

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"posthaste/internal/cli"
)

// TestTax has what the inserts cost taken off, of the same table and in the same round.
func TestTax(t *testing.T) {
	t.Parallel()
	list := choose([]string{"posthaste", "watermill"})
	var names []string
	for _, p := range list {
		names = append(names, p.name)
	}
	if got := strings.Join(names, ", "); got != "none, posthaste, none (watermill), watermill" {
		t.Fatalf("measured are %s", got)
	}
	r := &report{Rounds: 2}
	for range 2 {
		found := map[string]figures{
			"none":             {"inserts_per_second": 200, "postgres_us": 50},
			"posthaste":        {"inserts_per_second": 100, "postgres_us": 70, "relay_us": 5, "redis_us": 2},
			"none (watermill)": {"inserts_per_second": 100, "postgres_us": 30},
			"watermill":        {"inserts_per_second": 100, "postgres_us": 70, "relay_us": 1, "missing": 200},
		}
		for _, f := range found {
			f["written"] = 400
		}
		r.add(load{name: "100/s"}, list, found)
	}
	for name, want := range map[string]float64{"posthaste": 27, "watermill": 11} { // the latter paid for 400 inserts
		for _, w := range r.Rows {
			if f := w.Figures["tax_us"]; w.Peer == name && (len(f.Runs) != 2 || math.Abs(f.Median-want) > 1e-9) {
				t.Errorf("the tax of %s is %+v, want %v", name, *f, want)
			}
		}
	}
	var out bytes.Buffer
	if err := r.print(&out); err != nil || !strings.Contains(out.String(), "| 50 ") {
		t.Errorf("%v, and no inserts at half the rate in\n%s", err, out.String())
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

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{
		"--rounds=0", "--seconds=0", "--size=1", "--rates=x", "--rates=-1", "--peers=nobody", "something",
	} {
		o := cli.IO{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
		if _, err := parse([]string{arg}, o); err == nil {
			t.Errorf("%s is not refused", arg)
		}
	}
}
