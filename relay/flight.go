package relay

import "posthaste/outbox"

// flight is what was published and waits to be settled. Where streams live apart it is of one stream, so that none
// waits for what another one got at the same time.
type flight struct {
	// rows are those that were published or parked.
	rows      []flown
	published int
	marks     []outbox.Mark
	entries   outbox.Entries
	end       outbox.LSN // every transaction ending at or below it is complete with this flight
	events    int        // in the window
	bytes     int
	// late is set until what is in it is published: its stream's server does not answer. landed is set in a flight that
	// says that this is over, and is the one that was late.
	late   bool
	landed *flight
	// owed are the transactions of rows that the mark does not see, behind those of rows that are late. Only the
	// settler uses them.
	owed, behind []uint64
}

// spent reports whether nothing of it is to be settled or told any more. Its end waits for what is before it.
func (f *flight) spent() bool { return !f.late && len(f.owed)+len(f.marks) == 0 }

// flown is a row as the stream knows it.
type flown struct {
	xid uint32
	seq int64
}
