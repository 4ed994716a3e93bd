package testenv

import (
	"testing"

	"posthaste/internal/lab/link"
)

// Link and Trouble are a proxy that simulates network faults, and its faults.
type (
	Link    = link.Link
	Trouble = link.Trouble
)

// NewLink starts a proxy for upstream ("host:port") that can delay, lose, cut, and switch to another server.
func NewLink(tb testing.TB, upstream string) *Link {
	tb.Helper()
	l, err := link.New(tb.Context(), upstream)
	Must(tb, err)
	tb.Cleanup(l.Close)
	return l
}

// Strange starts a proxy in front of a Redis that behaves as a service with oddities.
func Strange(tb testing.TB, r *RedisServer, odd link.Oddities) *link.Strange {
	tb.Helper()
	s, err := link.NewStrange(tb.Context(), r.Addr(), odd)
	Must(tb, err)
	tb.Cleanup(s.Close)
	return s
}
