package ops

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/bridge"
	"posthaste/outbox"
	"posthaste/sql"
)

// Remains is what a database still has of an outbox.
type Remains struct {
	// Schema is set if posthaste's tables exist, Led if a relay leads.
	Schema, Led bool
	// Waiting is the number of unpublished events, Dead that of dead events.
	Waiting, Dead int64
}

// Lost describes the events that are lost with the tables; "" if no event is lost.
func (r Remains) Lost() string {
	if r.Waiting == 0 && r.Dead == 0 {
		return ""
	}
	return CountOf(r.Waiting, "unpublished event") + " and " + CountOf(r.Dead, "dead event")
}

// FindRemains reads what the database has. If the tables will be dropped, it returns an error for tables that are in
// use or have unpublished or dead events, unless force is set.
func FindRemains(ctx context.Context, pool *pgxpool.Pool, tables, force bool) (r Remains, err error) {
	switch err := sql.CheckSchema(ctx, pool); {
	case errors.Is(err, sql.ErrSchemaNewer) && tables:
		return r, err // the database has tables that this version does not know
	case errors.Is(err, sql.ErrSchemaMissing), sql.SQLState(err) != "":
		return r, nil
	case err != nil && !errors.Is(err, sql.ErrSchemaNewer):
		return r, err // an error of the connection
	}
	r.Schema = true
	pulse, err := sql.ReadPulse(ctx, pool)
	r.Led = err == nil && pulse.Led
	if !tables {
		return r, nil
	}
	if err == nil {
		err = r.count(ctx, pool)
	}
	switch {
	case force:
		return r, nil
	case err != nil:
		return r, fmt.Errorf("find out what would be lost (--force drops the tables anyway): %w", err)
	case r.Led:
		return r, errors.New("a relay leads: stop every relay, or drop the tables under it with --force")
	}
	return r, r.refuse()
}

// count reads how many events would be lost.
func (r *Remains) count(ctx context.Context, db sql.DB) (err error) {
	if r.Waiting, _, err = sql.Backlog(ctx, db, 0); err == nil {
		r.Dead, err = sql.CountDead(ctx, db)
	}
	return err
}

// refuse returns an error if events would be lost.
func (r *Remains) refuse() error {
	if r.Lost() == "" {
		return nil
	}
	return fmt.Errorf("the outbox has %s: run a relay until they are published (posthaste status, posthaste dead "+
		"list), or lose them with --force", r.Lost())
}

// Uninstalled lists what Uninstall removed. Objects that did not exist count as removed.
type Uninstalled struct {
	Slot        bool `json:"slot"` // false if it belongs to another database, and stays
	Publication bool `json:"publication"`
	Tables      bool `json:"tables"`
	// Bridges are the tables whose rows are no longer copied.
	Bridges []string `json:"bridges,omitempty"`
}

// Uninstall removes the slot, the bridges, the publication and, if tables is set, the tables. It works with a schema of
// any version, and without a schema. Unless force is set, it keeps the tables, with an error, if they have events that
// would be lost: some may have been committed since FindRemains.
func Uninstall(ctx context.Context, pool *pgxpool.Pool, slots outbox.Slots, publication string, found Remains,
	tables, force bool,
) (Uninstalled, error) {
	err := slots.Drop(ctx)
	slot, refused := errors.AsType[*outbox.SlotError](err)
	theirs := refused && slot.Reason == outbox.ReasonSlotForeign
	if err != nil && !theirs {
		return Uninstalled{}, err
	}
	bridges, err := bridge.DropAll(ctx, pool)
	if err != nil {
		return Uninstalled{}, err
	}
	var check func(ctx context.Context, db sql.DB) error
	if found.Schema && !force {
		check = func(ctx context.Context, db sql.DB) error {
			if err := found.count(ctx, db); err != nil {
				return err
			}
			return found.refuse()
		}
	}
	err = sql.Uninstall(ctx, pool, publication, tables, check)
	return Uninstalled{Slot: !theirs, Publication: true, Tables: tables, Bridges: bridges}, err
}
