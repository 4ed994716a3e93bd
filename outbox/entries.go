package outbox

import (
	"cmp"
	"strconv"
	"strings"
)

// Entries are the highest entries that Redis has given, by stream, for what a mark adds to the one before.
type Entries map[string]string

// Raise notes an entry of a stream, "" for none, if it is behind the one noted.
func (e Entries) Raise(stream, id string) {
	if id != "" && CompareIDs(id, e[stream]) > 0 {
		e[stream] = id
	}
}

// CompareIDs orders the ids of stream entries as Redis does: negative if a is before b, 0 if they are the same. "" is
// before all.
func CompareIDs(a, b string) int {
	am, as := splitID(a)
	bm, bs := splitID(b)
	return cmp.Or(cmp.Compare(am, bm), cmp.Compare(as, bs))
}

func splitID(id string) (ms, seq uint64) {
	m, q, _ := strings.Cut(id, "-")
	ms, _ = strconv.ParseUint(m, 10, 64)
	seq, _ = strconv.ParseUint(q, 10, 64)
	return ms, seq
}
