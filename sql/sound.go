package sql

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"posthaste/outbox"
)

// Change is a change of the table by another tool that breaks a guarantee.
type Change struct{ What, Remedy string }

// Changes returns the changes of the table that break a guarantee.
func Changes(ctx context.Context, db DB) (list []Change, err error) {
	f, err := tableFacts(ctx, db)
	if err != nil {
		return nil, err
	}
	if f.parts != outbox.Partitions {
		list = append(list, Change{
			fmt.Sprintf("the table outbox_part has %d rows of %d, and a sweep skips the events of the others", f.parts,
				outbox.Partitions),
			fmt.Sprintf("execute INSERT INTO outbox_part SELECT generate_series(0, %d) ON CONFLICT DO NOTHING",
				outbox.Partitions-1),
		})
	}
	if !f.rises {
		list = append(list, Change{
			"the numbers of the sequence outbox_seq_seq fall, so a later event of an aggregate is published first",
			"ALTER SEQUENCE outbox_seq_seq INCREMENT BY 1",
		})
	}
	if !f.continues {
		list = append(list, Change{
			"the sequence outbox_seq_seq is behind the table, so inserts fail and later events have lower numbers",
			"execute SELECT setval('outbox_seq_seq', (SELECT max(seq) FROM outbox))",
		})
	}
	if !f.guarded {
		list = append(list, Change{
			"a trigger of the table outbox is disabled or missing, so changed rows are published differently in the " +
				"modes cdc and poll",
			"ALTER TABLE outbox ENABLE TRIGGER USER, or create it as the migration does",
		})
	}
	if f.cache != 1 {
		list = append(list, Change{
			fmt.Sprintf("the sequence outbox_seq_seq has CACHE %d, so a later event of an aggregate can have a lower "+
				"number and be published first", f.cache),
			"run posthaste migrate, which sets it to 1",
		})
	}
	if !f.indexed {
		list = append(list, Change{
			"the index outbox_owed is missing or not valid, so each search for events reads the whole table, and the " +
				"limits of events are not checked",
			"REINDEX INDEX outbox_owed, or create it as the migration does",
		})
	}
	return list, nil
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
