package cdc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"posthaste/outbox"
)

// Each script in testdata is a sequence of calls and expectations, one per line.
func TestTrackerScripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			must(t, err)
			var tr tracker
			for n, line := range strings.Split(string(text), "\n") {
				line, _, _ = strings.Cut(line, "#")
				if f := strings.Fields(line); len(f) > 0 {
					if err := step(&tr, f); err != nil {
						t.Fatalf("line %d: %v", n+1, err)
					}
				}
			}
		})
	}
}

func step(tr *tracker, f []string) error {
	var at outbox.LSN
	if len(f) > 1 && f[0] != "pending" {
		var err error
		if at, err = outbox.ParseLSN(f[1]); err != nil {
			return err
		}
	}
	switch f[0] {
	case "begin":
		tr.Begin()
	case "opened":
		tr.Opened(at)
	case "empty":
		tr.Empty(at)
	case "idle":
		tr.Idle(at)
	case "done":
		tr.Done(at)
	case "flushed":
		if got := tr.Flushed(); got != at {
			return fmt.Errorf("flushed %s, want %s", got, at)
		}
	case "pending":
		if want, err := strconv.Atoi(f[1]); err != nil || tr.Pending() != want {
			return fmt.Errorf("pending %d, want %s", tr.Pending(), f[1])
		}
	default:
		return fmt.Errorf("unknown step %q", f[0])
	}
	return nil
}

// The model knows every position ever seen and every transaction with rows. The highest position with nothing unsettled
// at or below it may be confirmed.
func TestTrackerAgainstTheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var (
			tr               tracker
			now, settled     outbox.LSN
			known, withRows  []outbox.LSN
			receiving, first = false, outbox.LSN(0)
		)
		model := func() (want outbox.LSN) {
			blocked := ^outbox.LSN(0)
			for _, e := range withRows {
				if e > settled {
					blocked = min(blocked, e)
				}
			}
			for _, p := range known {
				if p < blocked {
					want = max(want, p)
				}
			}
			return want
		}
		t.Repeat(map[string]func(*rapid.T){
			"transaction": func(t *rapid.T) {
				now += outbox.LSN(rapid.IntRange(1, 3).Draw(t, "gap"))
				if !receiving {
					tr.Begin()
					receiving = true
					return
				}
				receiving = false
				known = append(known, now)
				if rapid.Bool().Draw(t, "rows") {
					withRows = append(withRows, now)
					tr.Opened(now)
				} else {
					tr.Empty(now)
				}
			},
			"idle": func(t *rapid.T) {
				now += outbox.LSN(rapid.IntRange(0, 3).Draw(t, "gap"))
				tr.Idle(now)
				if !receiving {
					known = append(known, now)
				}
			},
			"done": func(t *rapid.T) {
				// Reported late, twice, out of order; never beyond what was received.
				end := outbox.LSN(rapid.Uint64Range(0, uint64(now)).Draw(t, "end"))
				tr.Done(end)
				// Settled refers to transactions known by now.
				for _, e := range withRows {
					if e <= end {
						settled = max(settled, e)
					}
				}
			},
			"": func(t *rapid.T) {
				got := tr.Flushed()
				if got < first {
					t.Fatalf("went back from %s to %s", first, got)
				}
				first = got
				if want := model(); got != want {
					t.Fatalf("flushed %s, want %s", got, want)
				}
			},
		})
	})
}
