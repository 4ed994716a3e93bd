package console

import (
	"slices"
	"strings"

	"posthaste/outbox"
	"posthaste/sink"
)

// notAStream reports whether a key holds something else. Its events are parked, which is said elsewhere.
func notAStream(err error) bool { return sink.Class(err) == "wrongtype" }

func integer(v any) int64 {
	n, _ := v.(int64)
	return n
}

// str is text from anybody who may write to Redis.
func str(v any) string {
	s, _ := v.(string)
	return strings.ToValidUTF8(s, "?")
}

// sortByEntry orders events of several streams by when they were added.
func sortByEntry(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int { return outbox.CompareIDs(a.EntryID, b.EntryID) })
}
