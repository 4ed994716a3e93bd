package consumer

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

// A reader finds no room before the worker that was woken has taken the one queue there is. It has to be told when that
// has happened: only then is there something to park, and nothing else may happen for as long as the handler takes.
func TestCapacityIsFoundWhenTheLastQueueIsTaken(t *testing.T) {
	t.Parallel()
	const window = 64
	l := newQueues(window, time.Hour)
	l.idle = 1 // a second worker, which waits
	var es []*entry
	for i := range window - 16 {
		id := strconv.Itoa(i+1) + "-0"
		es = append(es, &entry{
			stream: "s", id: id, at: parseEntryID(id), values: map[string]any{"subject": "one"}, size: 1,
			seen: time.Now(),
		})
	}
	l.add(es)
	n, changed := l.tryCapacity(32)
	if n >= 32 {
		t.Fatalf("room for %d", n)
	}
	if _, ok := l.next(); !ok {
		t.Fatal("nothing to run")
	}
	select {
	case <-changed:
	default:
		t.Fatal("the reader is not told")
	}
	if n, _ := l.tryCapacity(32); n < 32 {
		t.Errorf("room for %d", n)
	}
}

// Two readers wait for room, one for more of it. Everybody is told of every change: the first may
// find too little, and must not have used up what the other one waits for.
func TestEverybodyWhoWaitsForRoomIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const window = 64
		l := newQueues(window, time.Hour)
		var es []*entry
		for i := range window {
			id := strconv.Itoa(i+1) + "-0"
			es = append(es, &entry{
				stream: "s", id: id, at: parseEntryID(id), values: map[string]any{"subject": id}, size: 1,
				seen: time.Now(),
			})
		}
		l.add(es)
		for range es {
			e, _ := l.next()
			l.done(e, true)
		}
		var reader, other int
		go func() { reader = l.capacity(t.Context(), 32) }()
		synctest.Wait()
		go func() { other = l.capacity(t.Context(), 16) }()
		synctest.Wait()
		l.acked(es[:8])
		synctest.Wait()
		if reader > 0 || other > 0 {
			t.Fatalf("room for %d and %d while 56 of %d are not acknowledged", reader, other, window)
		}
		l.acked(es[8:])
		synctest.Wait()
		if reader != window || other != window {
			t.Errorf("room for %d and %d, want %d: somebody waits forever", reader, other, window)
		}
	})
}
