package sink_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// A sign of life excludes leaders of other processes and servers, and lasts longer once both are known to be running.
func TestOneIsAlive(t *testing.T) {
	t.Parallel()
	ctx, r, source := t.Context(), testenv.Redis(t), uuid.New()
	s := sink.New(sink.Options{Client: r.Client, Source: "/posthaste/test"})
	alive := func(id, server string, before *outbox.Sign) *outbox.Sign {
		t.Helper()
		other, err := s.Alive(ctx, source, outbox.Member{ID: id, Server: server, Holder: "of " + id}, before)
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
	for _, m := range [][2]string{{"a", "1"}, {"a", "2"}, {"b", "2"}} { // another server, another process
		if other := alive(m[0], m[1], nil); other != nil {
			t.Fatalf("%s on %s: %+v", m[0], m[1], other)
		}
	}
	first := alive("c", "3", nil)
	if first == nil || first.ID != "b" || first.Server != "2" || first.Holder != "of b" {
		t.Fatalf("seen %+v", first)
	}
	lasts(0, 5*time.Second)
	alive("b", "2", nil)
	alive("c", "3", first)
	lasts(10*time.Second, 30*time.Second)
	alive("b", "2", nil)
	lasts(0, 5*time.Second)
	testenv.Eventually(t, 20*time.Second, func() error {
		if alive("c", "3", nil) != nil {
			return errors.New("the other one is alive")
		}
		return nil
	})
}
