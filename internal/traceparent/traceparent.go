// Package traceparent parses the W3C trace context of events and requests, the text of a traceparent header. It comes
// from outside, so invalid ones must be ignored: a tracer would refuse them or start a new trace.
package traceparent

import "strings"

// Len is the length of a trace context of version 00. Later versions may append more after a dash.
const Len = 55

const hex = "0123456789abcdef"

// Valid reports whether s has the form version-traceid-parentid-flags, of a possible version, with ids that are not
// zero.
func Valid(s string) bool {
	if len(s) < Len || s[2] != '-' || s[35] != '-' || s[52] != '-' || s[:2] == "ff" || len(s) > Len && s[Len] != '-' {
		return false
	}
	for i := range Len {
		if i != 2 && i != 35 && i != 52 && strings.IndexByte(hex, s[i]) < 0 {
			return false
		}
	}
	return strings.Trim(s[3:35], "0") != "" && strings.Trim(s[36:52], "0") != ""
}

// Sampled returns the trace id if s is valid and its trace is sampled, else "".
func Sampled(s string) string {
	if !Valid(s) || strings.IndexByte(hex, s[54])&1 == 0 {
		return ""
	}
	return s[3:35]
}
