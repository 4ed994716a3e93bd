package outbox_test

import (
	"testing"

	"posthaste/outbox"
)

// Ids of entries are numbers, not texts.
func TestEntriesAreCompared(t *testing.T) {
	t.Parallel()
	ids := []string{"", "9-1", "10-0", "10-2", "10-10", "1700000000000-0", "1700000000000-18446744073709551615"}
	for a := range ids {
		for b := range ids {
			if got := outbox.CompareIDs(ids[a], ids[b]); (got < 0) != (a < b) || (got > 0) != (a > b) {
				t.Errorf("%q and %q: %d", ids[a], ids[b], got)
			}
		}
	}
}
