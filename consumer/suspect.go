package consumer

import (
	"sync"
	"time"
)

// An entry that was begun at least twice without a known end may be what crashes the process; or it merely ran at the
// time of a crash, and its acknowledgement was lost. To distinguish these, suspects run one at a time, and the next one
// begins only when the acknowledgement of the last one has reached Redis. So from the third crash on only the culprit's
// attempts increase. Other entries run concurrently.

// suspectAfter is how many beginnings without an end make a suspect. The first one may be only a delivery.
const suspectAfter = 2

// suspectPause is how long a suspect waits before it checks again whether it may run.
const suspectPause = 10 * time.Millisecond

// quarantine holds the suspect that runs or waits for its acknowledgement.
type quarantine struct {
	mu sync.Mutex
	in *entry
}

// enter reports whether e may run.
func (q *quarantine) enter(e *entry) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.in == nil {
		q.in = e
	}
	return q.in == e
}

// leave lets the next suspect run, if e was the one.
func (q *quarantine) leave(e *entry) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.in == e {
		q.in = nil
	}
}
