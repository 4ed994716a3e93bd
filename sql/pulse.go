package sql

import "context"

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
