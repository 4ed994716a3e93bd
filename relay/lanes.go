package relay

import (
	"sync"
	"sync/atomic"

	"posthaste/outbox"
)

// lanes are the stream lanes of one run, by stream. The publisher, or a laggard, opens them and tells the gates what is
// settled; the settler says what is.
type lanes struct {
	gates *gates
	id    outbox.Lane

	mu       sync.Mutex
	byStream map[string]*lane
}

// lane is the lane of one stream, and how far it is settled.
type lane struct {
	pub     outbox.LanePublisher
	settled atomic.Int64 // batch number
	told    int64        // batch number, for the lane's owner only
}

func newLanes(g *gates) *lanes {
	return &lanes{
		gates: g, id: outbox.Lane{Part: outbox.StreamLane, Nonce: g.owner.Nonce},
		byStream: map[string]*lane{},
	}
}

// of returns the lane of a stream that is ready. For its owner only, like tell; untold and told are the publisher's.
func (ls *lanes) of(stream string) *lane {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ln := ls.byStream[stream]
	if ln == nil {
		ln = &lane{pub: ls.gates.lane(stream, ls.id)}
		ls.byStream[stream] = ln
	}
	return ln
}

// settled notes that batches are settled.
func (ls *lanes) settled(marks []outbox.Mark) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, m := range marks {
		ls.byStream[m.Stream].settled.Store(m.Number)
	}
}

// untold returns what is settled and was not told to the gates, but for streams that are skipped.
func (ls *lanes) untold(skip func(stream string) bool) (marks []outbox.Mark) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for name, ln := range ls.byStream {
		if n := ln.settled.Load(); n > ln.told && !skip(name) {
			marks = append(marks, outbox.Mark{Stream: name, Lane: ls.id, Number: n})
		}
	}
	return marks
}

// told notes that the gates know of marks.
func (ls *lanes) told(marks []outbox.Mark) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, m := range marks {
		if ln := ls.byStream[m.Stream]; m.Number > ln.told { // a publish may have told it more meanwhile
			ln.told = m.Number
			ln.pub.Settled(m.Number)
		}
	}
}

// tell passes on what the settler finished, for the next publish to carry along.
func (ln *lane) tell() {
	if n := ln.settled.Load(); n > ln.told {
		ln.pub.Settled(n)
		ln.told = n
	}
}
