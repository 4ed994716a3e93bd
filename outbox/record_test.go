package outbox_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"posthaste/internal/testenv"
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
