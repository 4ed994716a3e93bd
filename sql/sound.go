package sql

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Change is a change of the table by another tool that breaks a guarantee.
type Change struct{ What, Remedy string }

// Changes returns the changes of the table that break a guarantee.
func Changes(ctx context.Context, db DB) ([]Change, error) {
	return structs[Change](ctx, db, "look at the outbox table", "sound")
}

// Sound returns an error that names the changes of the table, and their remedies.
func Sound(ctx context.Context, db DB) error {
	list, err := Changes(ctx, db)
	if err != nil || len(list) == 0 {
		return err
	}
	texts := make([]string, len(list))
	for i, c := range list {
		texts[i] = c.What + ": " + c.Remedy
	}
	return errors.New(strings.Join(texts, "; "))
}

// uncache makes sessions take one number at a time. It runs only if needed, because it waits for every open transaction
// that has inserted an event, and inserts queue behind it.
func uncache(ctx context.Context, db DB) error {
	const what = "look at the sequence of events"
	var cached bool
	if err := scan(ctx, db, what, "sequence_cached", nil, &cached); err != nil || !cached {
		return err
	}
	_, err := exec(ctx, db, "the sequence of events", "sequence_cache")
	return err
}

// Sound also returns an error while commits wait for a synchronous standby.
func (s *Store) Sound(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if p, err := ReadPulse(ctx, s.pool); err == nil && p.Hung {
		return fmt.Errorf("%w: %s", ErrCommitsWait, StandbyRemedy)
	}
	return Sound(ctx, s.pool)
}

// Pulse is a state of the outbox that is cheap enough to read every second.
type Pulse struct {
	// Written is how many sequence numbers events have used, including rolled back ones. Only its increase is
	// meaningful: for a role that lacks the right to read the sequence it comes from statistics, which a crash of
	// Postgres resets.
	Written int64
	// Led reports whether a relay holds the leader's lock.
	Led bool
	// Relays is the number of connected relay processes; 0 if this role cannot see them.
	Relays int
	// Hung reports whether a commit has waited long for a synchronous standby. A role sees only its own sessions
	// wait, unless it has pg_read_all_stats.
	Hung bool
}

// ReadPulse reads the pulse without reading a table.
func ReadPulse(ctx context.Context, db DB) (Pulse, error) {
	var p Pulse
	err := scan(ctx, db, "read the pulse", "pulse", nil, &p.Written, &p.Led, &p.Relays, &p.Hung)
	return p, err
}
