package relay

import "posthaste/outbox"

// flight is what was published and waits to be settled.
type flight struct {
	// rows are those that were published or parked.
	rows      []flown
	published int
	marks     []outbox.Mark
	entries   outbox.Entries
	end       outbox.LSN // every transaction ending at or below it is complete with this flight
	events    int        // in the window
	bytes     int
	// owed are the transactions of rows that the mark does not see. Only the settler uses it.
	owed []uint64
}

// flown is a row as the stream knows it.
type flown struct {
	xid uint32
	seq int64
}
