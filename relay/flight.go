package relay

import "posthaste/outbox"

// flight is what was published and waits to be settled.
type flight struct {
	items  []outbox.Settlement
	marks  []outbox.Mark
	end    outbox.LSN // every transaction ending at or below it is complete with this flight
	events int        // in the window
	bytes  int
	seqs   []int64
}
