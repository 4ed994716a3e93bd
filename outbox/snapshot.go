package outbox

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Snapshot determines for every transaction whether it had ended at a moment. It is the value of a pg_snapshot; see
// "Transaction ID and Snapshot Information Functions" in the Postgres manual. The zero value sees nothing. A later
// snapshot of a server sees everything that an earlier one sees.
type Snapshot struct {
	xmin, xmax uint64
	running    []uint64 // below xmax, ascending
}

// NewSnapshot returns the snapshot that sees every transaction below xmax except those in running.
func NewSnapshot(xmax uint64, running []uint64) Snapshot {
	s := Snapshot{xmin: xmax, xmax: xmax}
	for _, x := range running {
		if x < xmax {
			s.running = append(s.running, x)
		}
	}
	slices.Sort(s.running)
	s.running = slices.Compact(s.running)
	if len(s.running) > 0 {
		s.xmin = s.running[0]
	}
	return s
}

// ParseSnapshot reads the text form, "xmin:xmax:xip,xip".
func ParseSnapshot(text string) (Snapshot, error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return Snapshot{}, fmt.Errorf("parse snapshot %q", text)
	}
	var s Snapshot
	var err error
	number := func(digits string) (n uint64) {
		if err == nil {
			n, err = strconv.ParseUint(digits, 10, 64)
		}
		return n
	}
	s.xmin, s.xmax = number(parts[0]), number(parts[1])
	for x := range strings.SplitSeq(parts[2], ",") {
		if x != "" {
			s.running = append(s.running, number(x))
		}
	}
	if err != nil {
		return Snapshot{}, fmt.Errorf("parse snapshot %q: %w", text, err)
	}
	slices.Sort(s.running)
	return s, nil
}

// String returns the text form.
func (s Snapshot) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d:%d:", s.xmin, s.xmax)
	for i, x := range s.running {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatUint(x, 10))
	}
	return b.String()
}

// Max is the first transaction id after all ids that the snapshot can see.
func (s Snapshot) Max() uint64 { return s.xmax }

// Running lists the transactions below Max that are not seen, ascending. The caller must not change it.
func (s Snapshot) Running() []uint64 { return s.running }

// Sees reports whether the transaction had ended when the snapshot was taken. A commit can be read from the WAL before
// that is true: with synchronous replication, seconds before.
func (s Snapshot) Sees(xid uint64) bool {
	if xid < s.xmin || xid >= s.xmax {
		return xid < s.xmin
	}
	_, running := slices.BinarySearch(s.running, xid)
	return !running
}

// Visible is Sees for an id as the WAL has it: its lower half.
func (s Snapshot) Visible(xid uint32) bool { return s.Sees(s.Widen(xid)) }

// Widen completes a 32-bit transaction id by taking the one nearest to Max, as Postgres itself does: an id in the
// stream is never 2^31 transactions away.
func (s Snapshot) Widen(xid uint32) uint64 {
	return uint64(int64(s.xmax) + int64(int32(xid-uint32(s.xmax)))) //nolint:gosec // wraps around on purpose
}

// Settled is the content of a mark: a row is settled, that is, published or parked, if Snapshot sees its transaction
// and its number is at most High. The number matters if a table was restored on another server, whose transactions have
// ids of their own. The zero value settles nothing.
type Settled struct {
	Snapshot Snapshot
	High     int64
}

// Holds reports whether a row is settled.
func (s Settled) Holds(xid uint32, seq int64) bool { return seq <= s.High && s.Snapshot.Visible(xid) }
