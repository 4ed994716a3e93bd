package consumer

import (
	"context"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
)

// pipelines counts them, and answers each at once.
type pipelines struct {
	redis.Hook
	n int
}

func (h *pipelines) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(context.Context, []redis.Cmder) error {
		h.n++
		return nil
	}
}

func (*pipelines) DialHook(next redis.DialHook) redis.DialHook { return next }

func (*pipelines) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// What is done when the consumer stops is acknowledged in as few round trips as ever.
func TestAcknowledgementsGoTogetherAtAStop(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = client.Close() })
	h := &pipelines{}
	client.AddHook(h)
	c, err := New(Options{
		Client: client, Group: "g", Streams: []string{"s"},
		Handler: func(context.Context, Event) error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range ackMax + 1 {
		c.acks <- &entry{stream: "s", id: fmt.Sprintf("1-%d", i)}
	}
	closing := make(chan struct{})
	close(closing)
	c.acknowledge(t.Context(), closing)
	if h.n != 2 {
		t.Errorf("%d round trips for %d acknowledgements, want 2", h.n, ackMax+1)
	}
}
