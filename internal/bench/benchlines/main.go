// Command benchlines reads the output of posthaste bench --json and writes it in the format of Go's benchmarks, which
// benchstat compares: one line for each row, with all of its figures.
//
// scripts/bench-compare.sh calls it.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
)

func main() {
	if err := convert(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "benchlines:", err)
		os.Exit(1)
	}
}

// row is a row of posthaste bench --json.
type row struct {
	Name    string `json:"name"`
	Figures map[string]struct {
		Median float64 `json:"median"`
	} `json:"figures"`
}

var spaces = regexp.MustCompile(`[^a-zA-Z0-9_./=]+`)

// convert writes the rows of a report as benchmarks. The unit of a figure is its name.
func convert(r io.Reader, w io.Writer) error {
	var report struct {
		Limits  []row `json:"limits"`
		Results []row `json:"results"`
	}
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return err
	}
	for prefix, rows := range map[string][]row{"Limit": report.Limits, "Result": report.Results} {
		for _, row := range rows {
			fmt.Fprintf(w, "Benchmark%s/%s 1", prefix, spaces.ReplaceAllString(row.Name, "-"))
			for _, name := range slices.Sorted(maps.Keys(row.Figures)) {
				fmt.Fprintf(w, " %g %s", row.Figures[name].Median, name)
			}
			fmt.Fprintln(w)
		}
	}
	return nil
}
