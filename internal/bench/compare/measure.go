package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// report is the output of `posthaste bench --json`. Older commits may have fewer fields.
type report struct {
	Limits  []row `json:"limits"`
	Results []row `json:"results"`
}

type row struct {
	Name    string `json:"name"`
	Figures map[string]struct {
		Median float64 `json:"median"`
	} `json:"figures"`
}

// measure runs the benchmark rounds times with both programs. In every other round the base runs second, so that a
// drift with time affects both alike.
func measure(ctx context.Context, p pair, bench []string, rounds int, stderr io.Writer) (*comparison, error) {
	c := &comparison{Base: p.base, New: p.tree, Bench: "posthaste bench " + strings.Join(bench, " "), Rounds: rounds}
	began, done := time.Now(), 0
	for n := range rounds {
		order := []program{p.base, p.tree}
		if n%2 == 1 {
			order = []program{p.tree, p.base}
		}
		for _, b := range order {
			isNew := b.path == p.tree.path
			name := "base"
			if isNew {
				name = "new"
			}
			at := time.Now()
			r, err := once(ctx, b, bench)
			if err != nil {
				return nil, fmt.Errorf("%s (%s): %w", name, b.Version, err)
			}
			c.add(r, n, isNew)
			done++
			left := time.Since(began) / time.Duration(done) * time.Duration(2*rounds-done)
			fmt.Fprintf(stderr, "round %d of %d: %-4s in %.0f s; about %v left\n", n+1, rounds, name,
				time.Since(at).Seconds(), left.Round(time.Second))
		}
	}
	return c, nil
}

// once runs a benchmark. The flags in bench come last, so they win.
func once(ctx context.Context, b program, bench []string) (report, error) {
	var r report
	args := append([]string{"bench", bench[0], "--json", "--runs=1"}, bench[1:]...)
	out, err := output(ctx, ".", b.path, args...)
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if err != nil {
		return r, fmt.Errorf("the benchmark failed (ARGS has to be one that both versions know): %w", err)
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return r, fmt.Errorf("posthaste %s: %w", strings.Join(args, " "), err)
	}
	if len(r.Results) == 0 {
		return r, errors.New("the benchmark reports no results")
	}
	return r, nil
}
