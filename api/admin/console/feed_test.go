package console

import (
	"context"
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
)

// feed answers feed.lua for streams a and b, which have one entry each, and fails for b if failing is set.
type feed struct {
	redis.Hook
	a       []any // the answer for a
	failing error
}

func (f *feed) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *feed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (f *feed) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		reply := []any{int64(1), int64(1), "5-0", int64(1)}
		switch cmd.Args()[3] {
		case "a":
			reply = f.a
		case "b":
			if f.failing != nil {
				cmd.SetErr(f.failing)
				return f.failing
			}
		}
		cmd.(*redis.Cmd).SetVal(reply)
		return nil
	}
}

// What is read of one stream is shown although another one fails in the same read: an event, and that one is missing.
func TestAReadThatFailsInTheMiddle(t *testing.T) {
	t.Parallel()
	f := &feed{a: []any{int64(1), int64(1), "5-0", int64(1)}}
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { _ = client.Close() })
	client.AddHook(f)
	w := newWatch(&Options{Redis: client})
	w.streams = []string{"a", "b"}
	w.feed.fresh(t.Context())
	f.failing = errors.New("i/o timeout")
	f.a = []any{int64(2), int64(2), "6-0", int64(1), []any{"6-0", "x", "t", "s", "", "0"}}
	w.feed.fresh(t.Context())
	f.a = []any{int64(0), int64(0), "", int64(0)}
	w.feed.fresh(t.Context())
	f.failing = nil
	w.feed.fresh(t.Context())
	events, lost := w.recent()
	if len(events) != 1 || lost.IsZero() || w.feed.look().Error != "" {
		t.Errorf("%d events, a loss at %v", len(events), lost)
	}
}

// A page that is closed does not cut the read that the others wait for.
func TestAPageThatIsClosed(t *testing.T) {
	t.Parallel()
	s := source[int]{read: func(ctx context.Context) (int, error) { return 1, ctx.Err() }}
	closed, closes := context.WithCancel(t.Context())
	closes()
	s.refresh(closed)
	if l := s.look(); l.Error != "" || l.Value != 1 {
		t.Errorf("%+v", l)
	}
}
