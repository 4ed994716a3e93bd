package relay

import "sync"

// taken are the rows that the publisher has taken and the settler has not finished, by number: what the audit need not
// miss in the table's place.
type taken struct {
	mu   sync.Mutex
	seqs map[int64]struct{}
}

func newTaken() *taken { return &taken{seqs: map[int64]struct{}{}} }

func (t *taken) add(seqs []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range seqs {
		t.seqs[n] = struct{}{}
	}
}

func (t *taken) remove(seqs []int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range seqs {
		delete(t.seqs, n)
	}
}

func (t *taken) has(seq int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.seqs[seq]
	return ok
}
