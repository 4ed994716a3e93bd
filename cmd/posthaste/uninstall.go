package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/ops"
	"posthaste/sql"
)

type uninstallCmd struct {
	Tables bool `help:"Drop the tables too, with everything in them."`
	Force  bool `help:"Drop the tables although a relay leads, or events are not published or dead: they are lost."`
	Yes    bool `help:"Do not ask."`
	JSON   bool `name:"json" help:"Print JSON."`
}

// Run removes posthaste's objects from the database. It works with a schema of any version, and without a schema: a
// slot without tables also fills the disk.
func (c uninstallCmd) Run(ctx context.Context, e *env) error {
	question := fmt.Sprintf("Drop slot %s, publication %s and all bridges", e.config.Slot, e.config.Publication)
	if c.Tables {
		question += " and ALL TABLES of posthaste in schema " + e.config.Schema
		err := e.config.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
			found, err := ops.FindRemains(ctx, pool, c.Tables, c.Force)
			if lost := found.Lost(); lost != "" {
				question += ", with " + lost
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := e.Confirm(ctx, c.Yes, question+"?"); err != nil {
		return err
	}
	return e.config.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		// Otherwise the slot of another outbox would be dropped.
		if err := sql.CheckRelayName(ctx, pool, e.config.RelayName); err != nil {
			return err
		}
		// Read again, because the user's answer may have taken long.
		found, err := ops.FindRemains(ctx, pool, c.Tables, c.Force)
		if err != nil {
			return err
		}
		if found.Led {
			fmt.Fprintln(e.Stderr, "posthaste: a relay is running and will create the slot and the publication again: "+
				"stop it, then repeat this command")
		}
		slots, err := e.config.Slots(pool, nil)
		if err != nil {
			return err
		}
		noting := pool
		if c.Tables || !found.Schema { // the table of the audit is dropped, or does not exist
			noting = nil
		}
		args := audit.Detail{"slot": e.config.Slot, "publication": e.config.Publication, "tables": c.Tables}
		var done ops.Uninstalled
		err = e.audited(ctx, noting, audit.Uninstall, args, func(ctx context.Context) (_ audit.Detail, err error) {
			done, err = ops.Uninstall(ctx, pool, slots, e.config.Publication, found, c.Tables, c.Force)
			return audit.Detail{"slot_dropped": done.Slot}, err
		})
		if err != nil {
			return err
		}
		lines := []string{"slot " + e.config.Slot + " is gone", "publication " + e.config.Publication + " is gone"}
		if !done.Slot {
			lines[0] = "slot " + e.config.Slot + " belongs to another database and was kept"
		}
		for _, table := range done.Bridges {
			lines = append(lines, "the bridge of "+table+" is gone")
		}
		if c.Tables {
			lines = append(lines, "the tables are gone")
		}
		return e.Result(c.JSON, done, lines...)
	})
}
