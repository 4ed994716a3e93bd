package testenv

import (
	"testing"

	"posthaste/internal/link"
)

// NewSwitch starts a proxy for upstream ("host:port") that can switch to another server, like a failover.
func NewSwitch(tb testing.TB, upstream string) *link.Link {
	tb.Helper()
	l, err := link.New(tb.Context(), upstream)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(l.Close)
	return l
}
