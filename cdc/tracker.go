package cdc

import "posthaste/outbox"

// tracker computes which position may be confirmed to the server. It does no I/O and reads no clock. It belongs to the
// reader's goroutine and to one connection.
//
// Flushed never decreases, never passes a transaction that is not settled, and never enters one that is still being
// received.
type tracker struct {
	// receiving is set between Begin and the Opened or Empty of the same transaction.
	receiving bool
	// open holds the transactions received and not done, ascending.
	open    []span
	flushed outbox.LSN
}

// span is one transaction that must be settled: it ends at end, and up to upto nothing else must be settled.
type span struct {
	end, upto outbox.LSN
}

// Begin notes that a transaction is being received.
func (t *tracker) Begin() { t.receiving = true }

// Opened notes that the transaction being received ended at end and has rows that must be settled.
func (t *tracker) Opened(end outbox.LSN) {
	t.receiving = false
	t.open = append(t.open, span{end, end})
}

// Empty notes that the transaction being received ended at end and has nothing to settle. It is done as soon as
// everything before it is.
func (t *tracker) Empty(end outbox.LSN) {
	t.receiving = false
	t.pass(end)
}

// Idle notes that the server has read up to position and sent everything committed below it. It is ignored while a
// transaction is being received, because the server does not say on which side of it the position is.
func (t *tracker) Idle(position outbox.LSN) {
	if !t.receiving {
		t.pass(position)
	}
}

// pass extends what is known to need nothing: behind the last open transaction, or at once if there is none.
func (t *tracker) pass(position outbox.LSN) {
	if n := len(t.open); n > 0 {
		t.open[n-1].upto = max(t.open[n-1].upto, position)
		return
	}
	t.flushed = max(t.flushed, position)
}

// Done notes that every transaction with an end at or below end is settled.
func (t *tracker) Done(end outbox.LSN) {
	n := 0
	for n < len(t.open) && t.open[n].end <= end {
		t.flushed = max(t.flushed, t.open[n].upto)
		n++
	}
	if n == len(t.open) {
		t.open = t.open[:0]
		return
	}
	t.open = t.open[n:]
}

// Flushed returns the position that may be confirmed; zero when nothing may be said yet.
func (t *tracker) Flushed() outbox.LSN { return t.flushed }

// Pending returns how many transactions wait to be settled.
func (t *tracker) Pending() int { return len(t.open) }
