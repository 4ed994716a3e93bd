package sql

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"posthaste/outbox"
)

// Sound checks that no change of the table by another tool breaks a guarantee. The error names the change and its
// remedy.
func Sound(ctx context.Context, db DB) error {
	indexed, cache, parts, err := tableFacts(ctx, db)
	if err != nil {
		return err
	}
	var changed []string
	if parts != outbox.Partitions {
		changed = append(changed, fmt.Sprintf("the table outbox_part has %d rows of %d, and a sweep skips the events "+
			"of the others: INSERT INTO outbox_part SELECT generate_series(0, %d) ON CONFLICT DO NOTHING", parts,
			outbox.Partitions, outbox.Partitions-1))
	}
	if cache != 1 {
		changed = append(changed, fmt.Sprintf("the sequence outbox_seq_seq has CACHE %d, so a later event of an "+
			"aggregate can have a lower number and be published first: run posthaste migrate, which sets it to 1",
			cache))
	}
	if !indexed {
		changed = append(changed, "the index outbox_owed is missing or not valid, so each search for events reads "+
			"the whole table, and the limits of events are not checked: REINDEX INDEX outbox_owed, or create it as "+
			"the migration does")
	}
	if len(changed) == 0 {
		return nil
	}
	return errors.New(strings.Join(changed, "; "))
}

// tableFacts returns whether the index of unsettled rows is valid, how many numbers a session takes from the sequence
// at once, and how many parts can be claimed.
func tableFacts(ctx context.Context, db DB) (indexed bool, cache int64, parts int, err error) {
	err = scan(ctx, db, "look at the outbox table", "sound", nil, &indexed, &cache, &parts)
	return indexed, cache, parts, err
}

// uncache makes sessions take one number at a time. It runs only if needed, because it waits for every open transaction
// that has inserted an event, and inserts queue behind it.
func uncache(ctx context.Context, db DB) error {
	_, cache, _, err := tableFacts(ctx, db)
	if err != nil || cache == 1 {
		return err
	}
	_, err = exec(ctx, db, "the sequence of events", "sequence_cache")
	return err
}

func (s *Store) Sound(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return Sound(ctx, s.pool)
}
