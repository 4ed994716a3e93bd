package idem

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"posthaste/internal/testenv"
)

// Batched publications have the same results as single ones, also if the server has lost the script.
func TestManyPublicationsAtOnce(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	g := guardOn(t, r.URL())
	for round := range 5 {
		const n = 100
		tickets := make([]*Ticket, n)
		for i := range tickets {
			tickets[i] = begin(t, g, request(fmt.Sprint(round, " ", i), "a")).Ticket
		}
		r.Client.ScriptFlush(t.Context())
		var wg sync.WaitGroup
		for i, ticket := range tickets {
			wg.Go(func() { ticket.Commit(t.Context(), Record{Status: 201, Ref: fmt.Sprint(i)}) })
		}
		wg.Wait()
		for i, ticket := range tickets {
			rec, _, err := parseRecord(rawRecord(t, r.Client, ticket.key))
			if err != nil || rec.Ref != fmt.Sprint(i) {
				t.Fatalf("record %d: %+v, %v", i, rec, err)
			}
		}
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		flying, waiting := g.node("").publications.State()
		return testenv.FailIf(flying+waiting != 0, "the queue is not at rest")
	})
}
