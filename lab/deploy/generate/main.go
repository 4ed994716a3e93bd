// Generate writes the manifests that are made of other files of the repository. Run it in the folder lab. The
// variable RUNBOOK is the address of the runbook that the rules link to.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"posthaste/lab/deploy"
)

func main() {
	all, err := deploy.Rules("../grafana/prometheus/rules", os.Getenv("RUNBOOK"))
	for name, text := range all {
		//nolint:gosec // for all users
		err = errors.Join(err, os.WriteFile(filepath.Join("../deploy/kubernetes", name), text, 0o644))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
