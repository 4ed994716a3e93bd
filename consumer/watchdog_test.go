package consumer

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

func TestWatchdog(t *testing.T) {
	t.Parallel()
	const workers = 8
	for name, c := range map[string]struct {
		counts queueCounts
		lag    int64
		deaf   bool
		cut    bool
		want   time.Duration // from when on it is said; 0: never
	}{
		"nothing to do":             {},
		"unread, and nobody reads":  {lag: 5, want: stallAfter},
		"lag unknown":               {lag: -1},
		"done and not acknowledged": {counts: queueCounts{held: 200, unacked: 200}, want: stallAfter},
		"held, and nothing runs":    {counts: queueCounts{held: 1}, want: stallAfter},
		"waiting for a retry":       {counts: queueCounts{held: 9, resting: 9}},
		"unread behind a retry":     {counts: queueCounts{held: 9, resting: 9}, lag: 1, want: stallAfter},
		"one handler takes long":    {counts: queueCounts{held: 3, running: 1, behind: 3}, want: hangAfter},
		"all handlers take long": {
			counts: queueCounts{held: 90, running: workers, behind: 8}, lag: 9,
			want: hangAfter,
		},
		"unread beside a handler": {counts: queueCounts{held: 3, running: 1, behind: 3}, lag: 9, want: stallAfter},
		"redis does not answer":   {deaf: true, want: stallAfter},
		"answers do not arrive":   {cut: true, want: stallAfter},
		"redis and a handler at work": {
			deaf: true, counts: queueCounts{held: 1, running: 1, behind: 1},
			want: stallAfter,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWatchdog()
			began := time.Now()
			w.told("s", c.lag, began)
			if c.deaf {
				w.answered("s", io.EOF, began)
				w.answered("t", nil, began) // another one does answer
			}
			if c.cut {
				w.cut("s", "too large", began)
			}
			said := time.Duration(0)
			for at := time.Duration(0); at <= 2*hangAfter && said == 0; at += time.Second {
				if why, news := w.check(c.counts, workers, began.Add(at)); why != "" {
					said = at
					if !news {
						t.Error("the first time is no news")
					}
				}
			}
			if c.want != 0 {
				c.want += time.Second
			}
			if said != c.want {
				t.Fatalf("said after %v, want %v", said, c.want)
			}
			if said == 0 {
				return
			}
			if _, news := w.check(c.counts, workers, began.Add(said+time.Second)); news {
				t.Error("the second time is news")
			}
			c.counts.moves++
			w.answered("s", redis.ErrClosed, began.Add(said)) // not news
			w.answered("s", redis.Nil, began.Add(said))
			w.read("s", began.Add(said))
			w.cut("s", "", began.Add(said))
			if why, news := w.check(c.counts, workers, began.Add(said+2*time.Second)); why != "" || !news {
				t.Errorf("after a move: %q, news %v", why, news)
			}
		})
	}
}

// A consumer that was idle for hours is not stalled as soon as there is work.
func TestWatchdogOfAnIdleConsumer(t *testing.T) {
	t.Parallel()
	w := newWatchdog()
	began := time.Now()
	w.told("s", 0, began)
	w.check(queueCounts{}, 1, began)
	w.check(queueCounts{}, 1, began.Add(time.Hour))
	w.told("s", 100, began.Add(time.Hour))
	for _, n := range []queueCounts{{}, {held: 100}, {held: 100, running: 1, behind: 1}} {
		if why, _ := w.check(n, 1, began.Add(time.Hour+time.Second)); why != "" {
			t.Error(why)
		}
	}
}

// An event that is tried again and again does not hide that nothing else moves, nor does another stream.
func TestWatchdogSeesPastRetries(t *testing.T) {
	t.Parallel()
	w := newWatchdog()
	l := newQueues(10, time.Hour)
	e := newEntry("s", redis.XMessage{ID: "1-0", Values: map[string]any{"subject": "a"}}, 1, time.Now())
	l.add([]*entry{e})
	began := time.Now()
	w.told("s", 5, began)
	w.told("t", 5, began)
	for at := time.Duration(0); at <= stallAfter+time.Second; at += time.Second {
		if next, ok := l.next(); !ok || next != e {
			t.Fatal("not the one entry")
		}
		l.retry(e, 0)
		w.read("t", began.Add(at))
		testenv.Eventually(t, time.Second, func() error {
			if l.counts().resting > 0 {
				return errors.New("delayed")
			}
			return nil
		})
		why, _ := w.check(l.counts(), 8, began.Add(at))
		if want := at > stallAfter; (why != "") != want {
			t.Fatalf("after %v: %q", at, why)
		}
	}
}
