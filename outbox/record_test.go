package outbox_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

func TestLSNText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]outbox.LSN{
		"0/0": 0, "0/16B3748": 0x16B3748, "A/FF": 0xA000000FF, "FFFFFFFF/FFFFFFFF": 0xFFFFFFFFFFFFFFFF,
	} {
		got, err := outbox.ParseLSN(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%s: got %v (%d), %v", text, got, got, err)
		}
	}
	for _, bad := range []string{"", "1", "x/y", "/"} {
		if _, err := outbox.ParseLSN(bad); err == nil {
			t.Errorf("ParseLSN(%q) gave no error", bad)
		}
	}
}

func TestTraceParent(t *testing.T) {
	t.Parallel()
	for headers, want := range map[string]string{
		"": "", "{}": "", "[]": "", "{": "", `{"traceparent":1}`: "",
		`{"traceparent":"00-a-b-01","x":"y"}`: "00-a-b-01",
	} {
		e := &outbox.Record{Headers: []byte(headers)}
		testenv.Equal(t, headers, e.TraceParent(), want)
	}
}

// SplitHeaders agrees with encoding/json on every object, whatever its form.
func TestSplitHeaders(t *testing.T) {
	t.Parallel()
	for headers, want := range map[string][2]string{
		"":   {},
		"{}": {}, "null": {}, `"traceparent"`: {}, `[{"traceparent": "x"}]`: {},
		`{"a": "b"}`:         {"", `{"a": "b"}`},
		`{"traceparent": 1}`: {}, `{"traceparent": ""}`: {}, `{"traceparent":"x"}`: {"x", ""},
		`{"a": 1, "traceparent": "x"}`:           {"x", `{"a": 1}`},
		`{"traceparent": "x", "a": 1}`:           {"x", `{"a": 1}`},
		`{"a": 1, "traceparent": "x", "b": 2}`:   {"x", `{"a": 1, "b": 2}`},
		` { "traceparent" : "x" , "a" : 1 }`[1:]: {"x", `{ "a" : 1 }`},
		`{"a": {"traceparent": "y"}, "b": ["traceparent"]}`: {
			"",
			`{"a": {"traceparent": "y"}, "b": ["traceparent"]}`,
		},
		`{"a": "\\\\\",{\\", "b": "traceparent", "traceparent": "x"}`: {"x", `{"a": "\\\\\",{\\", "b": "traceparent"}`},
		`{"\"traceparent\"": 1}`: {"", `{"\"traceparent\"": 1}`},
	} {
		traceParent, others := (&outbox.Record{Headers: []byte(headers)}).SplitHeaders()
		if traceParent != want[0] || string(others) != want[1] {
			t.Errorf("%s: got %q and %s, want %q and %s", headers, traceParent, others, want[0], want[1])
		}
	}
}

func FuzzSplitHeaders(f *testing.F) {
	f.Add(`{"traceparent": "x", "a": [1, {"traceparent": "\\\""}]}`)
	f.Fuzz(func(t *testing.T, headers string) {
		want := map[string]any{}
		traceParent, others := (&outbox.Record{Headers: []byte(headers)}).SplitHeaders()
		if json.Unmarshal([]byte(headers), &want) != nil || headers[0] != '{' ||
			strings.Count(headers, "traceparent") != 1 {
			return // must not panic
		}
		delete(want, "traceparent")
		got := map[string]any{}
		if others != nil {
			if err := json.Unmarshal(others, &got); err != nil {
				t.Fatalf("%s: %q, %s: %v", headers, traceParent, others, err)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %q and %v, want %v", headers, traceParent, got, want)
		}
	})
}

// Ids of entries are numbers, not texts.
func TestEntriesAreCompared(t *testing.T) {
	t.Parallel()
	ids := []string{"", "9-1", "10-0", "10-2", "10-10", "1700000000000-0", "1700000000000-18446744073709551615"}
	for a := range ids {
		for b := range ids {
			if got := outbox.CompareIDs(ids[a], ids[b]); (got < 0) != (a < b) || (got > 0) != (a > b) {
				t.Errorf("%q and %q: %d", ids[a], ids[b], got)
			}
		}
	}
}

func TestStreamNames(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		aggregate string
		shards    int
		want      string
	}{
		{"a", 0, "outbox.order"},
		{"a", 1, "outbox.order"},
		{"a", 16, "outbox.order.1"},
		{"", 16, "outbox.order.13"},
		{"", 8, "outbox.order.5"},
		{"", 4, "outbox.order.1"},
		{"", 2, "outbox.order.1"},
	} {
		got := outbox.Layout{Prefix: "outbox.", Shards: c.shards}.Stream("order", c.aggregate)
		testenv.Equal(t, "the stream of "+c.aggregate, got, c.want)
		testenv.Equal(t, "the base of "+got, outbox.BaseName(got, c.shards), "outbox.order")
	}
}

// Each number of streams divides the parts, and so whatever is together with more streams is together with fewer.
func TestShardCounts(t *testing.T) {
	t.Parallel()
	for i, n := range outbox.ShardCounts {
		testenv.Equal(t, "parts that are left over", outbox.Partitions%n, 0)
		used := map[string]bool{}
		for a := range 1000 {
			id := fmt.Sprint(a)
			used[outbox.Layout{Shards: n}.Stream("t", id)] = true
			if i > 0 && outbox.PartOf(id)%n%outbox.ShardCounts[i-1] != outbox.PartOf(id)%outbox.ShardCounts[i-1] {
				t.Errorf("%s changes its place", id)
			}
		}
		testenv.Equal(t, "streams that are used", len(used), n)
	}
}

// Naming a stream costs the name, and nothing else, whatever the aggregate is called.
//
//nolint:paralleltest // it counts what the whole process allocates
func TestStreamNameAllocates(t *testing.T) {
	id := "018f3a52-7c1e-7b9a-8d4e-1f2a3b4c5d6e and more than thirty-two bytes"
	for _, shards := range outbox.ShardCounts {
		l := outbox.Layout{Prefix: "outbox.", Shards: shards}
		if n := testing.AllocsPerRun(100, func() { _ = l.Stream("order", id) }); n > 1 {
			t.Errorf("with %d streams: %v allocations", shards, n)
		}
	}
}

func TestSnapshotVisible(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, snap string
		xid        uint32
		want       bool
	}{
		{"below xmin", "100:110:100,105", 99, true},
		{"running", "100:110:100,105", 105, false},
		{"ended between", "100:110:100,105", 104, true},
		{"at xmax", "100:110:100,105", 110, false},
		{"beyond xmax", "100:110:100,105", 400, false},
		{"later epoch, below", "12884901988:12884901998:12884901988", 99, true}, // 3<<32 + 100 …
		{"later epoch, running", "12884901988:12884901998:12884901988", 100, false},
		{"just wrapped, id of before", "12884901890:12884901893:", 4294967290, true},
		{"about to wrap, id of after", "12884901880:12884901885:", 5, false},
		{"nothing running", "100:100:", 99, true},
	} {
		s, err := outbox.ParseSnapshot(c.snap)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		testenv.Equal(t, c.name+": visible in "+c.snap, s.Visible(c.xid), c.want)
	}
	for _, bad := range []string{"", "1:2", "x:2:", "1:y:", "1:2:z", "1:2:3:4"} {
		if _, err := outbox.ParseSnapshot(bad); err == nil {
			t.Errorf("ParseSnapshot(%q) gave no error", bad)
		}
	}
}

// Whatever the server sends, there is no panic, and an id that is listed as running is not visible.
func FuzzParseSnapshot(f *testing.F) {
	f.Add("100:110:100,105", uint32(105))
	f.Add("12884901890:12884901893:", uint32(4294967290))
	f.Add("1:2:3:4", uint32(0))
	f.Fuzz(func(t *testing.T, text string, xid uint32) {
		if s, err := outbox.ParseSnapshot(text); err == nil {
			s.Visible(xid)
		}
		snap := fmt.Sprintf("%d:%d:%d", xid, uint64(xid)+1, xid)
		if s, err := outbox.ParseSnapshot(snap); err != nil || s.Visible(xid) {
			t.Errorf("%d is visible in %s, or %v", xid, snap, err)
		}
	})
}
