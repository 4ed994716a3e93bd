package sql

import (
	"fmt"
	"strconv"
	"strings"
)

// snapshot is the text form of a pg_snapshot, taken by the same statement that looked at rows. See "Transaction ID and
// snapshot information functions" in the Postgres manual.
type snapshot struct {
	xmin, xmax uint64
	running    map[uint64]bool
}

// parseSnapshot reads "xmin:xmax:xip,xip".
func parseSnapshot(s string) (snapshot, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 3 {
		return snapshot{}, fmt.Errorf("parse snapshot %q", s)
	}
	var snap snapshot
	var err error
	if snap.xmin, err = strconv.ParseUint(parts[0], 10, 64); err != nil {
		return snapshot{}, fmt.Errorf("parse snapshot %q: %w", s, err)
	}
	if snap.xmax, err = strconv.ParseUint(parts[1], 10, 64); err != nil {
		return snapshot{}, fmt.Errorf("parse snapshot %q: %w", s, err)
	}
	snap.running = map[uint64]bool{}
	for x := range strings.SplitSeq(parts[2], ",") {
		if x == "" {
			continue
		}
		id, err := strconv.ParseUint(x, 10, 64)
		if err != nil {
			return snapshot{}, fmt.Errorf("parse snapshot %q: %w", s, err)
		}
		snap.running[id] = true
	}
	return snap, nil
}

// full widens a 32-bit transaction id by taking the one nearest to xmax, as Postgres itself does: an id in the stream
// is never 2^31 transactions away.
func (s snapshot) full(xid uint32) uint64 {
	return uint64(int64(s.xmax) + int64(int32(xid-uint32(s.xmax))))
}

// Visible reports whether the transaction had ended when the snapshot was taken. A commit can be read from the WAL
// before that is true: with synchronous replication, seconds before.
func (s snapshot) Visible(xid uint32) bool {
	id := s.full(xid)
	return id < s.xmin || id < s.xmax && !s.running[id]
}
