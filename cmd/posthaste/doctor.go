package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"posthaste/api/admin"
)

type doctorCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// doctorOptions are the settings that the doctor measures against.
func (c Config) doctorOptions() admin.DoctorOptions {
	return admin.DoctorOptions{
		PostgresURL: c.PostgresURL, RedisURL: c.RedisURL, Schema: c.Schema, RelayName: c.RelayName, Slot: c.Slot, Publication: publication,
		WALBudget: c.WALBudget, StreamMaxlen: c.StreamMaxlen, History: c.History, Durability: c.Durability,
	}
}

// Run prints every finding and fails if the relay could not run safely in the desired mode.
func (c doctorCmd) Run(ctx context.Context, e *env) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	d := admin.Diagnose(ctx, e.config.doctorOptions())
	if c.JSON {
		if err := e.json(d); err != nil {
			return err
		}
	} else {
		for _, f := range d.Findings {
			word := paint(f.Severity, colours(e.stdout)) + strings.Repeat(" ", max(0, 5-len(f.Severity)))
			fmt.Fprintf(e.stdout, "%s %-22s %s\n", word, f.Check, foreign(f.Detail))
			if f.Mend != "" {
				fmt.Fprintf(e.stdout, "      %-22s -> %s\n", "", f.Mend)
			}
		}
	}
	if !d.OK {
		return errSaid
	}
	return nil
}
