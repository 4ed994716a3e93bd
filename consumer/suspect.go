package consumer

import (
	"sync"
	"time"
)

// An entry that was begun at least twice and of which no end was seen may be what kills the process; or it merely ran
// beside that, and its acknowledgement was lost with the process. To tell these apart, suspects run one at a time, and
// the next one begins only when the acknowledgement of the last one has reached Redis. So from the third crash on only
// the culprit's attempts grow. Other entries run on beside them.

// suspectAfter is how many beginnings without an end make a suspect. The first one may be only a delivery.
const suspectAfter = 2

// suspectPause is how long a suspect waits before it asks again whether it may run.
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
