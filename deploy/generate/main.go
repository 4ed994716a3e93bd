// Generate writes the manifests that are made of other files of the repository. Run it in the folder deploy.
package main

import (
	"fmt"
	"os"

	"posthaste/deploy"
)

func main() {
	text, err := deploy.Rules("../grafana/prometheus/rules")
	if err == nil {
		err = os.WriteFile("kubernetes/monitoring/rules.yaml", text, 0o644) //nolint:gosec // for everybody
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
