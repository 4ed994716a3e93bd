package api

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/idem"
	"posthaste/internal/testenv"
)

func TestManyClientsWaitForOneSlowOrder(t *testing.T) {
	t.Parallel()
	slowest, polls := manyWaiters(t, scale(500, 60))
	t.Logf("the last was answered %v after the publication, %.0f polls a second", slowest, polls)
}

// manyWaiters has n clients of two processes wait for one slow order of a third. It returns how long after the
// publication the last one was answered, and how often a second Redis was queried until then.
func manyWaiters(t *testing.T, n int, edit ...func(*Options)) (slowest time.Duration, polls float64) {
	t.Helper()
	owner := newWorld(t, edit...)
	reg := prometheus.NewRegistry()
	others := []*world{
		owner.sibling(append(edit, func(o *Options) { o.Registerer = reg })...),
		owner.sibling(edit...),
	}
	reached, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release() // the servers wait for their requests
	published := make(chan time.Time, 1)
	owner.s.failpoint = func(_ context.Context, name string) {
		switch name {
		case "after_acquire":
			close(reached)
			<-goOn
		case "after_publish":
			published <- time.Now()
		}
	}
	key := newKey()
	first := make(chan reply, 1)
	go func() { first <- owner.post(key, orderJSON(1)) }()
	<-reached
	replies := make([]reply, n)
	answered := make([]time.Time, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			replies[i] = others[i%2].post(key, orderJSON(1), "Prefer", "wait=10")
			answered[i] = time.Now()
		})
	}
	testenv.Eventually(t, 8*time.Second, func() error { // every client has tried to acquire
		got := acquisitions(t, owner)
		return testenv.FailIf(got < n+1, "%d of %d are there", got, n)
	})
	// A request that does not want to wait gets its answer at once, among the waiters.
	for _, o := range others {
		r := o.post(key, orderJSON(1), "Prefer", "wait=0")
		want(t, r, 409, "operation_in_progress")
		if r.header.Get("Retry-After") != "1" {
			t.Errorf("no Retry-After: %v", r.header)
		}
	}
	before, start := gets(t, owner), time.Now()
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(time.Since(start) < 500*time.Millisecond, "polls are being counted")
	})
	took := time.Since(start)
	if polls = float64(gets(t, owner)-before) / took.Seconds(); polls > 80 {
		t.Errorf("%.0f polls a second for %d clients of two processes", polls, n)
	}
	release()
	want(t, <-first, 201, "")
	at := <-published
	wg.Wait()
	for i, r := range replies {
		if r.status != 201 || r.body != replies[0].body || r.header.Get("Idempotent-Replayed") != "true" {
			t.Fatalf("client %d got %v", i, r)
		}
		slowest = max(slowest, answered[i].Sub(at))
	}
	if waited := counted(t, reg, idem.OutcomeWaited); waited < float64(n/2)*0.9 {
		t.Errorf("%v counted as waited in the first process, want nearly all of %d", waited, n/2)
	}
	owner.checkInvariants(1)
	return slowest, polls
}

// gets and acquisitions count how often a record was read from Redis, and how often a script ran.
func gets(t *testing.T, w *world) int         { return commandCalls(t, w, "get") }
func acquisitions(t *testing.T, w *world) int { return commandCalls(t, w, "evalsha") }

// commandCalls excludes the calls of scripts, which Redis counts too: each script reads its record once.
func commandCalls(t *testing.T, w *world, name string) int {
	t.Helper()
	info, err := w.redis.Client.InfoMap(t.Context(), "commandstats").Result()
	must(t, err)
	n := func(name string) int {
		v, _, _ := strings.Cut(strings.TrimPrefix(info["Commandstats"]["cmdstat_"+name], "calls="), ",")
		n, _ := strconv.Atoi(v)
		return n
	}
	if name == "get" {
		return n("get") - n("evalsha")
	}
	return n(name)
}
