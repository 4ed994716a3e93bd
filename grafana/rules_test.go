package grafana

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/goccy/go-yaml"
)

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// decodeAll reads every file that matches pattern as YAML of type T.
func decodeAll[T any](t *testing.T, pattern string) []T {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: no files, %v", pattern, err)
	}
	all := make([]T, len(files))
	for i, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(b, &all[i]); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return all
}

func rules(t *testing.T) []rule {
	t.Helper()
	var all []rule
	for _, f := range decodeAll[struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}](t, "prometheus/rules/*.yml") {
		for _, g := range f.Groups {
			all = append(all, g.Rules...)
		}
	}
	return all
}

func TestRules(t *testing.T) {
	t.Parallel()
	var names []string
	for _, r := range rules(t) {
		if r.Alert == "" || slices.Contains(names, r.Alert) {
			t.Errorf("%q: no alert, or one more of that name", r.Alert)
		}
		names = append(names, r.Alert)
		if s := r.Labels["severity"]; s != "page" && s != "ticket" {
			t.Errorf("%s: severity %q, want page or ticket", r.Alert, s)
		}
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s: no summary or no description", r.Alert)
		}
		for _, fault := range check(r.Expr) {
			t.Errorf("%s: %s", r.Alert, fault)
		}
	}
}

// TestRulesAreTested: make check runs the rules' tests with promtool; here, each alert must have one where it fires and
// one where it does not.
func TestRulesAreTested(t *testing.T) {
	t.Parallel()
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, f := range decodeAll[struct {
		Tests []struct {
			Alerts []struct {
				Name     string `yaml:"alertname"`
				Expected []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}](t, "prometheus/tests/*.yml") {
		for _, test := range f.Tests {
			for _, a := range test.Alerts {
				if len(a.Expected) > 0 {
					fires[a.Name] = true
				} else {
					quiet[a.Name] = true
				}
			}
		}
	}
	for _, r := range rules(t) {
		if !fires[r.Alert] || !quiet[r.Alert] {
			t.Errorf("%s: tested to fire: %v, to keep quiet: %v; want both", r.Alert, fires[r.Alert], quiet[r.Alert])
		}
	}
}
