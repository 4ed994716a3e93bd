package sink_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	port "posthaste/relay/stream"
	"posthaste/sink"
	"posthaste/sink/sinktest"
)

func TestRedisConforms(t *testing.T) {
	t.Parallel()
	sinktest.Run(t, func(t *testing.T) sinktest.Target { return target(t, testenv.Redis) })
}

func TestValkeyConforms(t *testing.T) {
	t.Parallel()
	sinktest.Run(t, func(t *testing.T) sinktest.Target { return target(t, testenv.Valkey) })
}

// target starts a server.
func target(t *testing.T, start func(testing.TB, ...string) *testenv.RedisServer) sinktest.Target {
	f := on(t, start(t, "stream-node-max-entries 10", "proto-max-bulk-len 1mb", "appendfsync no",
		"repl-diskless-sync-delay 0"), sink.Options{})
	h := &faults{}
	open := func(o sink.Options) port.Sink {
		b := boundTo(t, f.server.URL(), o)
		b.client.AddHook(h)
		return b.sink
	}
	// save copies keys, and returns what restores them.
	save := func(keys ...string) func() {
		dumps := map[string]string{}
		for _, key := range keys {
			dumps[key] = f.server.Client.Dump(t.Context(), key).Val()
		}
		return func() {
			for key, dump := range dumps {
				f.do("RESTORE", key, 0, dump, "REPLACE")
			}
		}
	}
	gate := func(name string, source uuid.UUID) string { return "{" + name + "}:gate:" + source.String() }
	return sinktest.Target{
		Open: func() port.Sink { return open(sink.Options{MaxLen: 20}) },
		Stored: func(name string) []uuid.UUID {
			return slices.DeleteFunc(f.stored(name), func(id uuid.UUID) bool { return id == uuid.Nil })
		},
		Lose: func(n int, arrive bool) {
			if arrive {
				h.after.Store(int32(n))
			} else {
				h.before.Store(int32(n))
			}
		},
		Late: func() func() {
			h.hold.Store(1)
			return func() { f.do(h.held[0]...) }
		},
		Poison: func(e *outbox.Record) { e.Payload = big(2 << 20).Payload },
		Refuse: func(name string) func() {
			f.do("RENAME", name, "aside")
			f.do("SET", name, "not a stream")
			return func() { f.do("RENAME", "aside", name) }
		},
		Half: func(_ string, n int) func() {
			gates := f.server.Client.Keys(t.Context(), register+":*").Val()
			f.Source = uuid.MustParse(strings.TrimPrefix(gates[0], register+":"))
			f.roomFor(int64(n))
			return f.emptied
		},
		Restart: func() { f.server.Restart(t) },
		Save: func() func() {
			return save(slices.Sorted(slices.Values(f.server.Client.Keys(t.Context(), "*").Val()))...)
		},
		Add:      func(name string) { f.do("XADD", name, "9999999999999-0", "somebody", "else") },
		Drop:     func(name string) { f.do("DEL", name) },
		DropGate: func(name string, source uuid.UUID) { f.do("DEL", gate(name, source)) },
		SaveGate: func(name string, source uuid.UUID) func() { return save(gate(name, source)) },
		Read: func(_, group string, n int) {
			f.ack(group, f.read(group, int64(n))...)
		},
		Undurable: func() (port.Sink, func()) {
			return open(sink.Options{Durability: sink.Durability{Replicas: 1}}), func() {
				start(t, fmt.Sprintf("replicaof 127.0.0.1 %d", f.server.Port))
			}
		},
	}
}
