package testenv

import (
	"testing"

	"posthaste/internal/link"
)

// NewSwitch starts an address that leads to upstream ("host:port"), and later to another server: a failover as clients
// see it.
func NewSwitch(tb testing.TB, upstream string) *link.Link {
	tb.Helper()
	l, err := link.New(tb.Context(), upstream)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(l.Close)
	return l
}
