package main

import (
	"context"
	"fmt"
	"io"
	"strings"
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
		if err := e.JSON(d); err != nil {
			return err
		}
	} else if err := printDiagnosis(e.Stdout, d); err != nil {
		return err
	}
	if !d.OK {
		return cli.ErrSaid
	}
	return nil
}

func printDiagnosis(w io.Writer, d ops.Diagnosis) error {
	var b strings.Builder
	for _, f := range d.Findings {
		word := paint(f.Severity, cli.Colours(w)) + strings.Repeat(" ", max(0, 5-len(f.Severity)))
		fmt.Fprintf(&b, "%s %-22s %s\n", word, f.Check, ops.Printable(f.Detail))
		if f.Remedy != "" {
			fmt.Fprintf(&b, "      %-22s -> %s\n", "", f.Remedy)
		}
	}
	fmt.Fprintf(&b, "\n%s\n", d.Verdict())
	_, err := io.WriteString(w, b.String())
	return err
}
