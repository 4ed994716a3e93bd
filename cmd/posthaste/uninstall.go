package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/bridge"
	"posthaste/outbox"
	"posthaste/sql"
)

type uninstallCmd struct {
	Tables bool `help:"Drop the tables too, with everything in them."`
	Force  bool `help:"Drop the tables although a relay leads, or events are not published or dead: they are lost."`
	Yes    bool `help:"Do not ask."`
	JSON   bool `name:"json" help:"Print JSON."`
}

// uninstalled lists what uninstall removed. Objects that did not exist count as removed.
type uninstalled struct {
	Slot        bool `json:"slot"` // false if it belongs to another database, and stays
	Publication bool `json:"publication"`
	Tables      bool `json:"tables"`
	// Bridges are the tables whose rows are no longer copied.
	Bridges []string `json:"bridges,omitempty"`
}

// Run removes posthaste's objects from the database. It works with a schema of any version, and without a schema: a
// slot without tables also fills the disk.
func (c uninstallCmd) Run(ctx context.Context, e *env) error {
	what := fmt.Sprintf("Drop slot %s, publication %s and all bridges", e.config.Slot, e.config.Publication)
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
		// Otherwise the slot of another outbox would be dropped.
		if err := sql.CheckRelayName(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		found, err := c.remains(ctx, pool) // read again, because the user's answer may have taken long
		if err != nil {
			return err
		}
		if found.led {
			fmt.Fprintln(e.Stderr,
				"posthaste: a relay is running and will create the slot and the publication again: stop it, then "+
					"repeat this command")
		}
		noting := pool
		if c.Tables || !found.schema { // the table of the audit is dropped, or does not exist
			noting = nil
		}
		args := audit.Detail{"slot": e.config.Slot, "publication": e.config.Publication, "tables": c.Tables}
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
		fmt.Fprintf(e.Stdout, "publication %s is gone\n", e.config.Publication)
		for _, table := range done.Bridges {
			fmt.Fprintf(e.Stdout, "the bridge of %s is gone\n", table)
		}
		if c.Tables {
			fmt.Fprintln(e.Stdout, "the tables are gone")
		}
		return nil
	})
}

// remains is what the database still has.
type remains struct {
	// schema is set if posthaste's tables exist.
	schema bool
	// led is set if a relay leads.
	led bool
	// waiting is the number of unpublished events, dead the number of dead events.
	waiting, dead int64
}

// lost describes the events that are lost with the tables; "" if no event is lost.
func (r remains) lost() string {
	if r.waiting == 0 && r.dead == 0 {
		return ""
	}
	return fmt.Sprintf("%d events that are not published and %d dead ones", r.waiting, r.dead)
}

// remains reads what the database has. With --tables, it refuses to drop tables that are in use or have unpublished or
// dead events, unless --force is set.
func (c uninstallCmd) remains(ctx context.Context, pool *pgxpool.Pool) (r remains, err error) {
	switch err := sql.CheckSchema(ctx, pool); {
	case errors.Is(err, sql.ErrSchemaNewer) && c.Tables:
		return r, err // the database has tables that this version does not know
	case errors.Is(err, sql.ErrSchemaMissing), sql.SQLState(err) != "":
		return r, nil
	case err != nil && !errors.Is(err, sql.ErrSchemaNewer):
		return r, err // an error of the connection
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
	bridges, err := bridge.DropAll(ctx, pool)
	if err != nil {
		return uninstalled{}, err
	}
	if err := sql.Uninstall(ctx, pool, e.config.Publication, tables); err != nil {
		return uninstalled{}, err
	}
	return uninstalled{Slot: !theirs, Publication: true, Tables: tables, Bridges: bridges}, nil
}
