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

// Refusals are the commands that services refuse, in words of their own.
var Refusals = map[string]string{
	"INFO": "this command is not available", "CONFIG": "ERR unknown command 'CONFIG', with args beginning with:",
	"CLIENT": "NOPERM this plan has no such command", "CLUSTER": "ERR cluster support is not for you",
	"HELLO": "ERR unsupported", "COMMAND": "nope", "MEMORY": "ERR command is not available: 'MEMORY'",
}
