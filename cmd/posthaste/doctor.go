package main

import (
	"context"
	"time"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

type doctorCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run prints every finding and the verdict, and fails if the relay could not run safely in the desired mode.
func (c doctorCmd) Run(ctx context.Context, e *env) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	o, err := e.config.DoctorOptions(ctx)
	if err != nil {
		return err
	}
	d := ops.Diagnose(ctx, o)
	if c.JSON {
		err = e.JSON(d)
	} else {
		err = e.Diagnosis(d)
	}
	if err == nil && !d.OK {
		err = cli.ErrSaid
	}
	return err
}
