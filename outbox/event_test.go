package outbox_test

import (
	"testing"

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
		e := &outbox.Event{Headers: []byte(headers)}
		if got := e.TraceParent(); got != want {
			t.Errorf("%s: got %q, want %q", headers, got, want)
		}
	}
}
