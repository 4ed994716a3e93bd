// Command generate writes the dashboards into a folder.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"posthaste/grafana"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one folder to write to, got %v", args)
	}
	all, err := grafana.Dashboards()
	if err != nil {
		return err
	}
	for name, text := range all {
		if err := os.WriteFile(filepath.Join(args[0], name), text, 0o644); err != nil { //nolint:gosec // for everybody
			return err
		}
	}
	return nil
}
