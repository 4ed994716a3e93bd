package main

import (
	"strings"
	"testing"
)

func TestConvert(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	err := convert(strings.NewReader(`{"bench": "drain", "results": [{"name": "cdc, backlog", "figures": {
		"wal_bytes": {"median": 210.5}, "relay_cpu_us": {"median": 3}}}]}`), &out)
	if want := "BenchmarkResult/cdc-backlog 1 3 relay_cpu_us 210.5 wal_bytes\n"; err != nil || out.String() != want {
		t.Errorf("%v: %q, want %q", err, out.String(), want)
	}
	if convert(strings.NewReader("no JSON"), &out) == nil {
		t.Error("text is taken for a report")
	}
}
