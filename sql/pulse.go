package sql

import (
	"context"
	"fmt"
)

// Pulse is what can be asked of Postgres every second at next to no cost.
type Pulse struct {
	// Written is how many numbers were given out to events since the table was made, rolled back ones included. Only
	// its rise means something: for a role without the right to see it, it is a statistic that a crash of Postgres
	// resets.
	Written int64
	// Led reports whether some relay holds the leader's lock.
	Led bool
	// Relays is how many relay processes are connected; 0 if this role may not see them.
	Relays int
}

// ReadPulse reads the pulse. It touches no table.
func ReadPulse(ctx context.Context, db DB) (Pulse, error) {
	var p Pulse
	if err := db.QueryRow(ctx, query("pulse")).Scan(&p.Written, &p.Led, &p.Relays); err != nil {
		return p, fmt.Errorf("read the pulse: %w", err)
	}
	return p, nil
}
