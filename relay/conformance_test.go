package relay

import (
	"testing"

	"github.com/google/uuid"

	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/sink/sinktest"
)

// The sink of a world keeps the promises that the real one keeps, so that the machine's tests prove something.
func TestTheWorldsSinkConforms(t *testing.T) {
	t.Parallel()
	sinktest.Run(t, func(t *testing.T) sinktest.Target {
		w := newWorld(t, Options{})
		r := w.rd
		clear(r.groups)
		return sinktest.Target{
			Open: func() stream.Sink { return memSink{w.instance("a")} },
			Stored: func(name string) (ids []uuid.UUID) {
				w.do(func() {
					if s := r.streams[name]; s != nil {
						for _, e := range s.entries {
							ids = append(ids, e.ID)
						}
					}
				})
				return ids
			},
			Lose: func(n int, arrive bool) {
				f := fault{"Sink.Publish", w.count("Sink.Publish"), refused}
				if arrive {
					f.kind = unheard
				}
				w.do(func() {
					w.plan, w.then, w.struck = f, nil, false
					for range n - 1 {
						w.then = append(w.then, fault{f.call, 0, f.kind})
					}
				})
			},
			Poison: func(e *outbox.Record) { e.Type = "poison" },
			Refuse: func(name string) func() {
				w.do(func() { r.wrongType[name] = true })
				return func() { w.do(func() { delete(r.wrongType, name) }) }
			},
			Restart: func() { w.do(r.restart) },
			Save: func() func() {
				old := r.copy()
				return func() { w.do(func() { r.streams, r.gates = old.streams, old.gates }) }
			},
			Drop:     func(name string) { w.do(func() { r.drop(name) }) },
			DropGate: func(name string, _ uuid.UUID) { w.do(func() { delete(r.gates, name) }) },
			SaveGate: func(name string, _ uuid.UUID) func() {
				old := r.gates[name].copy()
				return func() { w.do(func() { r.gates[name] = old }) }
			},
			Skip: map[string]string{
				"a claim after another of its session": "a world's sweeper has a claim for one turn",
				"the table goes back":                  "not modelled: no stream has an entry that is unknown",
				"leaders on two servers":               "not modelled: a test signs for the other leader",
			},
		}
	})
}
