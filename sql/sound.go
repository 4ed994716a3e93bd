package sql

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Sound returns an error that names what somebody has changed in the table so that a promise does not hold, and the
// remedy.
func Sound(ctx context.Context, db DB) error {
	var indexed bool
	var cache int64
	if err := db.QueryRow(ctx, query("sound")).Scan(&indexed, &cache); err != nil {
		return fmt.Errorf("look at the outbox table: %w", err)
	}
	var changed []string
	if cache != 1 {
		changed = append(changed, fmt.Sprintf("the sequence outbox_seq_seq has CACHE %d, so a later event of an "+
			"aggregate can have a lower number and be published first: run posthaste migrate, which sets it to 1",
			cache))
	}
	if !indexed {
		changed = append(changed, "the index outbox_owed is missing or not valid, so each search for events reads "+
			"the whole table: REINDEX INDEX outbox_owed, or create it as the migration does")
	}
	if len(changed) == 0 {
		return nil
	}
	return errors.New(strings.Join(changed, "; "))
}

// Sound is the function of that name.
func (s *store) Sound(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return Sound(ctx, s.pool)
}
