package sink_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

// sent keeps the last script that a client has sent.
type sent struct {
	mu   sync.Mutex
	args []any
}

func (s *sent) DialHook(next redis.DialHook) redis.DialHook { return next }

func (s *sent) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (s *sent) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		s.mu.Lock()
		s.args = nil
		for _, a := range cmd.Args() {
			if b, ok := a.([]byte); ok { // the next batch is made in the same memory
				a = slices.Clone(b)
			}
			s.args = append(s.args, a)
		}
		s.mu.Unlock()
		return next(ctx, cmd)
	}
}

// A call that was abandoned and runs long after it was repeated publishes nothing, neither after the next batch nor
// without a gate.
func TestALateCallPublishesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	calls := &sent{}
	f.client.AddHook(calls)
	l := f.lane(f.adopted(1))
	events := makeEvents(2)
	f.publish(l, events[0])
	late := calls.args
	f.publish(l, events[1])
	if reply, err := f.client.Do(t.Context(), late...).Result(); err != nil {
		t.Fatalf("%v, %v", reply, err)
	}
	if n := f.client.XLen(t.Context(), stream).Val(); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
	f.do("DEL", f.gate())
	if reply, err := f.client.Do(t.Context(), late...).Result(); err != nil {
		t.Fatalf("%v, %v", reply, err)
	}
	if n := f.client.XLen(t.Context(), stream).Val(); n != 2 {
		t.Errorf("%d entries without the gate, want 2", n)
	}
	f.do("FLUSHDB")
	if reply, err := f.client.Do(t.Context(), late...).Result(); err != nil {
		t.Fatalf("%v, %v", reply, err)
	}
	if n := f.client.Exists(t.Context(), stream, f.gate()).Val(); n != 0 {
		t.Errorf("the stream or the gate is there again")
	}
}
