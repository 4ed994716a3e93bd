package consumer

import (
	"strconv"
	"testing"
	"time"
)

// A reader finds no room before the worker that was woken has taken the one lane there is. It has to be told when that has
// happened: only then is there something to park, and nothing else may happen for as long as the handler takes.
func TestRoomIsFoundWhenTheLastLaneIsTaken(t *testing.T) {
	t.Parallel()
	const window = 64
	l := newLanes(window, time.Hour)
	l.idle = 1 // a second worker, which waits
	var es []*entry
	for i := range window - 16 {
		id := strconv.Itoa(i+1) + "-0"
		es = append(es, &entry{stream: "s", id: id, at: parseEntryID(id), values: map[string]any{"subject": "one"}, size: 1, seen: time.Now()})
	}
	l.add(es)
	if n := l.tryRoom(32); n >= 32 {
		t.Fatalf("room for %d", n)
	}
	if _, ok := l.next(); !ok {
		t.Fatal("nothing to run")
	}
	select {
	case <-l.space:
	default:
		t.Fatal("the reader is not told")
	}
	if n := l.tryRoom(32); n < 32 {
		t.Errorf("room for %d", n)
	}
}
