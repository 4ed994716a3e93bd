package sink_test

import (
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// A sign of life lasts for seconds, and longer once both leaders are known to be running. Package sinktest tests the
// rest.
func TestOneIsAlive(t *testing.T) {
	t.Parallel()
	ctx, r, source := t.Context(), testenv.Redis(t), uuid.New()
	s := sink.New(sink.Options{Client: r.Client, Source: "/posthaste/test"})
	alive := func(id string, before *outbox.Sign) *outbox.Sign {
		t.Helper()
		other, err := s.Alive(ctx, source, outbox.Member{ID: id, Server: "of " + id}, before)
		if err != nil {
			t.Fatal(err)
		}
		return other
	}
	lasts := func(least, most time.Duration) {
		t.Helper()
		if d := r.Client.PTTL(ctx, "{posthaste:"+source.String()+"}:alive").Val(); d <= least || d > most {
			t.Errorf("the sign lasts for %s", d)
		}
	}
	alive("b", nil)
	first := alive("c", nil)
	lasts(0, 5*time.Second)
	alive("b", nil)
	alive("c", first)
	lasts(10*time.Second, 30*time.Second)
	alive("b", nil)
	lasts(0, 5*time.Second)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(alive("c", nil) != nil, "the other one is alive")
	})
}
