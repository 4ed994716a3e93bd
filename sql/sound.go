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
	f, err := tableFacts(ctx, db)
	if err != nil {
		return err
	}
	var changed []string
	if f.parts != outbox.Partitions {
		changed = append(changed, fmt.Sprintf("the table outbox_part has %d rows of %d, and a sweep skips the events "+
			"of the others: INSERT INTO outbox_part SELECT generate_series(0, %d) ON CONFLICT DO NOTHING", f.parts,
			outbox.Partitions, outbox.Partitions-1))
	}
	if !f.rises {
		changed = append(changed, "the numbers of the sequence outbox_seq_seq fall, so a later event of an aggregate "+
			"is published first: ALTER SEQUENCE outbox_seq_seq INCREMENT BY 1")
	}
	if !f.continues {
		changed = append(changed, "the sequence outbox_seq_seq is behind the table, so inserts fail and later events "+
			"have lower numbers: SELECT setval('outbox_seq_seq', (SELECT max(seq) FROM outbox))")
	}
	if !f.guarded {
		changed = append(changed, "a trigger of the table outbox is disabled or missing, so changed rows are "+
			"published differently in the modes cdc and poll: ALTER TABLE outbox ENABLE TRIGGER USER, or create it as "+
			"the migration does")
	}
	if f.cache != 1 {
		changed = append(changed, fmt.Sprintf("the sequence outbox_seq_seq has CACHE %d, so a later event of an "+
			"aggregate can have a lower number and be published first: run posthaste migrate, which sets it to 1",
			f.cache))
	}
	if !f.indexed {
		changed = append(changed, "the index outbox_owed is missing or not valid, so each search for events reads "+
			"the whole table, and the limits of events are not checked: REINDEX INDEX outbox_owed, or create it as "+
			"the migration does")
	}
	if len(changed) == 0 {
		return nil
	}
	return errors.New(strings.Join(changed, "; "))
}

// facts is what sound.sql finds.
type facts struct {
	indexed                   bool
	cache                     int64 // numbers that a session takes from the sequence at once
	parts                     int   // that can be claimed
	rises, continues, guarded bool  // the sequence rises, and is not behind the table; its triggers are enabled
}

func tableFacts(ctx context.Context, db DB) (f facts, err error) {
	err = scan(ctx, db, "look at the outbox table", "sound", nil, &f.indexed, &f.cache, &f.parts, &f.rises,
		&f.continues, &f.guarded)
	return f, err
}

// uncache makes sessions take one number at a time. It runs only if needed, because it waits for every open transaction
// that has inserted an event, and inserts queue behind it.
func uncache(ctx context.Context, db DB) error {
	f, err := tableFacts(ctx, db)
	if err != nil || f.cache == 1 {
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
