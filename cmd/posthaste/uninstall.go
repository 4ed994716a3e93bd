package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/outbox"
	"posthaste/sql"
)

type uninstallCmd struct {
	Tables bool `help:"Drop the tables too, with everything in them."`
	Yes    bool `help:"Do not ask."`
	JSON   bool `name:"json" help:"Print JSON."`
}

// uninstalled is what uninstall removed; what was not there counts as removed.
type uninstalled struct {
	Slot        bool `json:"slot"` // false: it is another database's, and stays
	Publication bool `json:"publication"`
	Tables      bool `json:"tables"`
}

// Run removes what posthaste left in the database. It wants no schema of its own version, and none at all: a slot whose
// tables are gone fills the disk as well.
func (c uninstallCmd) Run(ctx context.Context, e *env) error {
	what := fmt.Sprintf("Drop slot %s and publication %s", e.config.Slot, app.Publication)
	if c.Tables {
		what += " and ALL TABLES of posthaste, orders included, in schema " + e.config.Schema
	}
	if err := e.Confirm(ctx, c.Yes, what+"?"); err != nil {
		return err
	}
	return e.config.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		noting := pool
		switch err := sql.CheckSchema(ctx, pool); {
		case errors.Is(err, sql.ErrSchemaNewer) && c.Tables:
			return err // it has tables that this version does not know
		case errors.Is(err, sql.ErrSchemaNewer):
		case errors.Is(err, sql.ErrSchemaMissing), sql.SQLState(err) != "":
			noting = nil // the table may not be there
		case err != nil:
			return err // of the connection
		}
		if pulse, err := sql.ReadPulse(ctx, pool); err == nil && pulse.Led {
			fmt.Fprintln(e.Stderr,
				"posthaste: a relay is running and will create the slot and the publication again: stop it, then "+
					"repeat this command")
		}
		if c.Tables {
			noting = nil // the table goes, too
		}
		args := audit.Detail{"slot": e.config.Slot, "publication": app.Publication, "tables": c.Tables}
		var done uninstalled
		err := e.audited(ctx, noting, audit.Uninstall, args, func(ctx context.Context) (_ audit.Detail, err error) {
			done, err = e.uninstall(ctx, pool, c.Tables)
			return audit.Detail{"slot_dropped": done.Slot}, err
		})
		if err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(done)
		}
		if done.Slot {
			fmt.Fprintf(e.Stdout, "slot %s is gone\n", e.config.Slot)
		} else {
			fmt.Fprintf(e.Stdout, "slot %s belongs to another database and was kept\n", e.config.Slot)
		}
		fmt.Fprintf(e.Stdout, "publication %s is gone\n", app.Publication)
		if c.Tables {
			fmt.Fprintln(e.Stdout, "the tables are gone")
		}
		return nil
	})
}

func (e *env) uninstall(ctx context.Context, pool *pgxpool.Pool, tables bool) (uninstalled, error) {
	slots, err := e.config.Slots(pool, nil)
	if err != nil {
		return uninstalled{}, err
	}
	var slot *outbox.SlotError
	err = slots.Drop(ctx)
	theirs := errors.As(err, &slot) && slot.Reason == outbox.ReasonSlotForeign
	if err != nil && !theirs {
		return uninstalled{}, err
	}
	if err := sql.Uninstall(ctx, pool, app.Publication, tables); err != nil {
		return uninstalled{}, err
	}
	return uninstalled{Slot: !theirs, Publication: true, Tables: tables}, nil
}
