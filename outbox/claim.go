package outbox

import (
	"cmp"
	"errors"
	"strconv"
	"strings"
)

// PartPass is a pass over one part: the rows that were unsettled when its snapshot was taken, by number, page by page.
// It is valid until another session writes a mark of the part.
type PartPass struct {
	Part int
	// Mark is the part's newest mark. UnderWay is set if it records this pass. Settled and Hi are its columns: the
	// snapshot as text, and the number.
	Mark     int64
	UnderWay bool
	Settled  string
	Hi       int64
	// Seen and High are the snapshot of the pass as text, and its number.
	Seen string
	High int64
	// Seqs are the listed rows that this pass has not settled. Full means that there may be rows after them.
	Seqs []int64
	Full bool
	// Page is how many of Seqs the last page covers.
	Page int
	// Over is set when the whole pass is settled.
	Over bool
}

// Idle reports that there is nothing to do: all rows are settled and no pass was under way.
func (p *PartPass) Idle() bool { return len(p.Seqs) == 0 && !p.UnderWay }

// Listed reports whether rows are left to read. If not, and the pass is not over, another list continues it.
func (p *PartPass) Listed() bool { return len(p.Seqs) > 0 }

// Next leaves the rows of the last page behind.
func (p *PartPass) Next() { p.Seqs, p.Page = p.Seqs[p.Page:], 0 }

// Ends reports whether the last page is the last one of the pass.
func (p *PartPass) Ends() bool { return p.Page == len(p.Seqs) && !p.Full }

// Turn notes that the mark Mark settles the last page, and leaves its rows behind.
func (p *PartPass) Turn() {
	if p.Over = p.Ends(); p.Over {
		p.Settled, p.Hi = p.Seen, p.High
	}
	p.UnderWay = !p.Over
	p.Next()
}

// ErrPassed means that another session has written a mark since the pass was begun: begin again.
var ErrPassed = errors.New("another session has written a mark of the part")

// Refused is an event to park, and the reason.
type Refused struct {
	Event    *Record
	Err      error
	Class    string
	Attempts int
}

// UnreadableError concerns the data of a row, so that a smaller read may avoid it.
type UnreadableError struct {
	// OutOfMemory is set if the server ran out of memory for the statement.
	OutOfMemory bool
	Err         error
}

func (e *UnreadableError) Error() string { return e.Err.Error() }

// Unwrap returns the error of Postgres.
func (e *UnreadableError) Unwrap() error { return e.Err }

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
