package consumer

import "context"

// capacity waits until at least want more entries may be read, and returns how many may. 0 only when ctx has ended.
//
// A key that is slow or waits for a retry must not fill the window and so keep the other keys' entries from being read.
// So when there are workers with nothing to do and no room to read, the waiting entries of busy and delayed keys are
// parked: their payload is dropped, and read again when their turn comes.
func (qs *queues) capacity(ctx context.Context, want int) int {
	want = min(want, qs.window)
	for ctx.Err() == nil {
		n, changed := qs.tryCapacity(want)
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

// tryCapacity returns how many entries may be read and, if these are fewer than want, what to wait for.
func (qs *queues) tryCapacity(want int) (int, <-chan struct{}) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	n := qs.available()
	if n < want && qs.idle > 0 && len(qs.ready) == 0 && len(qs.held) < maxHeld {
		qs.park()
		n = qs.available()
	}
	if n >= want {
		return n, nil
	}
	return n, qs.space.wait()
}

func (qs *queues) available() int {
	if qs.bytes >= windowBytes || len(qs.held) >= maxHeld {
		return 0
	}
	return qs.window - qs.loaded - qs.unacked
}

// park drops payloads until half the window is free. The next few entries of every queue keep theirs, unless they wait
// for a retry.
func (qs *queues) park() {
	keep := min(refill, max(1, qs.window/64))
	for _, q := range qs.bySubject {
		if qs.loaded <= qs.window/2 && qs.bytes <= windowBytes/2 {
			return
		}
		kept := min(keep, len(q.entries))
		if q.timer != nil && qs.failing < maxFailing {
			kept = 0
		}
		for _, e := range q.entries[kept:] {
			qs.unload(e)
		}
	}
}

// parked returns e, whose queue runs it, and the parked entries that follow it in its queue, at most refill and about
// refillBytes in all. After a failure it returns e only.
func (qs *queues) parked(e *entry) []*entry {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	out, bytes := []*entry{e}, e.size
	for _, f := range e.queue.entries {
		if bytes += f.size; len(out) == refill || f.values != nil || bytes > refillBytes || e.reloads > 0 {
			break
		}
		out = append(out, f)
	}
	return out
}

// unpark gives entries their payloads back. Those that were lost meanwhile are left alone.
func (qs *queues) unpark(es []*entry, values []map[string]any) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for i, e := range es {
		if values[i] != nil && e.values == nil && qs.held[e.ref()] == e {
			e.values = values[i]
			qs.loaded++
			qs.bytes += e.size
		}
	}
}

// waiting returns the held entries that neither run nor are done, which an orderly stop gives back. It corrects their
// counts, so that the next consumer counts no attempt during an outage that this one would not have counted.
func (qs *queues) waiting() map[string][]*entry {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	out := map[string][]*entry{}
	for _, q := range qs.bySubject {
		for _, e := range q.entries {
			if qs.outage(e) {
				e.attempt = 1
			}
			out[e.stream] = append(out[e.stream], e)
		}
	}
	return out
}
