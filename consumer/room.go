package consumer

import "context"

// room waits until at least want more entries may be read, and returns how many may. 0 only when ctx has ended.
//
// A key that is slow or waits for a retry must not fill the window and so keep the other keys' entries from being read.
// So when there are workers with nothing to do and no room to read, the waiting entries of busy and delayed keys are
// parked: their payload is dropped, and read again when their turn comes.
func (l *lanes) room(ctx context.Context, want int) int {
	want = min(want, l.window)
	for ctx.Err() == nil {
		n, changed := l.tryRoom(want)
		if n >= want {
			return n
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return 0
}

// tryRoom returns how many entries may be read and, if these are fewer than want, what to wait for.
func (l *lanes) tryRoom(want int) (int, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.available()
	if n < want && l.idle > 0 && l.head == len(l.ready) && len(l.held) < maxHeld {
		l.park()
		n = l.available()
	}
	if n >= want {
		return n, nil
	}
	return n, l.space.wait()
}

func (l *lanes) available() int {
	if l.bytes >= windowBytes || len(l.held) >= maxHeld {
		return 0
	}
	return l.window - l.loaded - l.unacked
}

// park drops payloads until half the window is free. The next few entries of every lane keep theirs.
func (l *lanes) park() {
	for _, ln := range l.lanes {
		if l.loaded <= l.window/2 && l.bytes <= windowBytes/2 {
			return
		}
		for i := len(ln.queue) - 1; i >= 1; i-- {
			if e := ln.queue[i]; e.values != nil && i >= keep(l.window) {
				l.unload(e)
			}
		}
	}
}

// keep is how many waiting entries of a lane are not parked.
func keep(window int) int { return min(refill, max(1, window/64)) }

// parked returns e, whose lane runs it, and the parked entries that follow it in its lane, at most refill in all.
func (l *lanes) parked(e *entry) []*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := []*entry{e}
	for _, f := range e.lane.queue {
		if len(out) == refill || f.values != nil {
			break
		}
		out = append(out, f)
	}
	return out
}

// unpark gives entries their payloads back. Those that were lost meanwhile are left alone.
func (l *lanes) unpark(es []*entry, values []map[string]any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range es {
		if values[i] != nil && e.values == nil && l.held[e.ref()] == e {
			e.values = values[i]
			l.loaded++
			l.bytes += e.size
		}
	}
}

// waiting returns what is held and does not run and is not done: what an orderly stop gives back.
func (l *lanes) waiting() map[string][]*entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string][]*entry{}
	for _, ln := range l.lanes {
		for _, e := range ln.queue {
			out[e.stream] = append(out[e.stream], e)
		}
	}
	return out
}
