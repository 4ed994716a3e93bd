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
	Force  bool `help:"Drop the tables although a relay leads, or events are not published or dead: they are lost."`
	Yes    bool `help:"Do not ask."`
	JSON   bool `name:"json" help:"Print JSON."`
}

// uninstalled is what uninstall removed; what was not there counts as removed.
type uninstalled struct {
	Slot        bool `json:"slot"` // false: it is another database's, and stays
	Publication bool `json:"publication"`
	Tables      bool `json:"tables"`
}

// Run removes what posthaste left in the database. It works on a schema of any version, and without one: a slot whose
// tables are gone fills the disk as well.
func (c uninstallCmd) Run(ctx context.Context, e *env) error {
	what := fmt.Sprintf("Drop slot %s and publication %s", e.config.Slot, app.Publication)
	if c.Tables {
		what += " and ALL TABLES of posthaste in schema " + e.config.Schema
		var found remains
		err := e.config.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
			found, err = c.remains(ctx, pool)
			return err
		})
		if err != nil {
			return err
		}
		if text := found.lost(); text != "" {
			what += ", with " + text
		}
	}
	if err := e.Confirm(ctx, c.Yes, what+"?"); err != nil {
		return err
	}
	return e.config.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		found, err := c.remains(ctx, pool) // again: the answer may have taken long
		if err != nil {
			return err
		}
		if found.led {
			fmt.Fprintln(e.Stderr,
				"posthaste: a relay is running and will create the slot and the publication again: stop it, then "+
					"repeat this command")
		}
		noting := pool
		if c.Tables || !found.schema { // the audit's table goes, too, or is not there
			noting = nil
		}
		args := audit.Detail{"slot": e.config.Slot, "publication": app.Publication, "tables": c.Tables}
		var done uninstalled
		err = e.audited(ctx, noting, audit.Uninstall, args, func(ctx context.Context) (_ audit.Detail, err error) {
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

// remains is what a database still has.
type remains struct {
	// schema: posthaste's tables are there.
	schema bool
	// led: a relay leads.
	led bool
	// waiting events are not published, dead ones were given up.
	waiting, dead int64
}

// lost names the events that are lost with the tables, "" for none.
func (r remains) lost() string {
	if r.waiting == 0 && r.dead == 0 {
		return ""
	}
	return fmt.Sprintf("%d events that are not published and %d dead ones", r.waiting, r.dead)
}

// remains reads what the database has. With --tables it refuses, unless forced, to drop what is in use or would be
// lost.
func (c uninstallCmd) remains(ctx context.Context, pool *pgxpool.Pool) (r remains, err error) {
	switch err := sql.CheckSchema(ctx, pool); {
	case errors.Is(err, sql.ErrSchemaNewer) && c.Tables:
		return r, err // it has tables that this version does not know
	case errors.Is(err, sql.ErrSchemaMissing), sql.SQLState(err) != "":
		return r, nil
	case err != nil && !errors.Is(err, sql.ErrSchemaNewer):
		return r, err // of the connection
	}
	r.schema = true
	pulse, err := sql.ReadPulse(ctx, pool)
	if !c.Tables {
		r.led = err == nil && pulse.Led
		return r, nil
	}
	if err == nil {
		r.led = pulse.Led
		r.waiting, _, err = sql.Backlog(ctx, pool, 0)
	}
	if err == nil {
		r.dead, err = sql.CountDead(ctx, pool)
	}
	switch {
	case c.Force:
		return r, nil
	case err != nil:
		return r, fmt.Errorf("find out what would be lost (--force drops the tables anyway): %w", err)
	case r.led:
		return r, errors.New("a relay leads: stop every relay, or drop the tables under it with --force")
	case r.lost() != "":
		return r, fmt.Errorf("the outbox has %s: run a relay until they are published (posthaste status, posthaste "+
			"dead list), or lose them with --force", r.lost())
	}
	return r, nil
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
