package testenv

import (
	"testing"

	"posthaste/internal/link"
)

// Strange starts a proxy in front of a Redis that behaves as a service with oddities.
func Strange(tb testing.TB, r *RedisServer, odd link.Oddities) *link.Strange {
	tb.Helper()
	s, err := link.NewStrange(tb.Context(), r.Addr(), odd)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return s
}
