package grafana

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

type rule struct {
	Alert       string            `yaml:"alert"`
	Record      string            `yaml:"record"`
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
		must(t, err)
		if err := yaml.Unmarshal(b, &all[i]); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return all
}

func rules(t *testing.T) (alerts, records []rule) {
	t.Helper()
	for _, f := range decodeAll[struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}](t, "prometheus/rules/*.yml") {
		for _, g := range f.Groups {
			for _, r := range g.Rules {
				if r.Record != "" {
					records = append(records, r)
				} else {
					alerts = append(alerts, r)
				}
			}
		}
	}
	return alerts, records
}

var (
	recordedName = regexp.MustCompile(`\b\w+(?::\w+)+\b`)
	bareValue    = regexp.MustCompile(`\$value *\}\}`)
)

func TestRules(t *testing.T) {
	t.Parallel()
	alerts, records := rules(t)
	recorded := map[string]bool{}
	for _, r := range records {
		recorded[r.Record] = true
		for _, fault := range check(r.Expr) {
			t.Errorf("%s: %s", r.Record, fault)
		}
	}
	var names []string
	for _, r := range alerts {
		if r.Alert == "" || slices.Contains(names, r.Alert) {
			t.Errorf("%q: no alert, or one more of that name", r.Alert)
		}
		names = append(names, r.Alert)
		if !regexp.MustCompile("^(?:" + ourAlerts + ")$").MatchString(r.Alert) {
			t.Errorf("%s does not show among the firing alerts of the dashboards, which are %s", r.Alert, ourAlerts)
		}
		if s := r.Labels["severity"]; s != "critical" && s != "warning" && s != "info" {
			t.Errorf("%s: severity %q, want critical, warning or info", r.Alert, s)
		}
		for _, a := range []string{"summary", "description"} {
			if text := r.Annotations[a]; text == "" || bareValue.MatchString(text) {
				t.Errorf("%s: %s %q is empty, or shows a value that is not made readable", r.Alert, a, text)
			}
		}
		for _, fault := range check(r.Expr) {
			t.Errorf("%s: %s", r.Alert, fault)
		}
		for _, name := range recordedName.FindAllString(r.Expr, -1) {
			if !recorded[name] {
				t.Errorf("%s: nothing records %s", r.Alert, name)
			}
		}
	}
}

var (
	headings = regexp.MustCompile(`(?m)^### (\S+)$`)
	parts    = []string{"**Symptom.**", "**Check.**", "**Fix.**", "**Verify.**"}
)

// runbookBase is where the Grafana of docker-compose.yml serves the runbook.
const runbookBase = "http://localhost:3000" + docs + "runbook.md"

// TestRunbook checks that every alert links to its section of the runbook, that the section has its four parts, and
// that the runbook has no other alert.
func TestRunbook(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../docs/runbook.md")
	must(t, err)
	page := string(b)
	sections := map[string]string{}
	places := headings.FindAllStringSubmatchIndex(page, -1)
	for i, m := range places {
		end := len(page)
		if i+1 < len(places) {
			end = places[i+1][0]
		}
		sections[page[m[2]:m[3]]] = page[m[1]:end]
	}
	alerts, _ := rules(t)
	for _, r := range alerts {
		if got, want := r.Annotations["runbook_url"], runbookBase+"#"+strings.ToLower(r.Alert); got != want {
			t.Errorf("%s: runbook_url %q, want %s", r.Alert, got, want)
		}
		section, ok := sections[r.Alert]
		if !ok {
			t.Errorf("%s: the runbook has no such heading", r.Alert)
			continue
		}
		delete(sections, r.Alert)
		for _, p := range parts {
			if !strings.Contains(section, p) {
				t.Errorf("%s: the runbook does not say %s", r.Alert, p)
			}
		}
	}
	for name := range sections {
		t.Errorf("the runbook speaks of %s, which is no alert", name)
	}
}

// TestRulesAreTested checks that each alert has a test in which it fires and one in which it does not. make check runs
// these tests with promtool.
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
	alerts, _ := rules(t)
	for _, r := range alerts {
		if !fires[r.Alert] || !quiet[r.Alert] {
			t.Errorf("%s: tested to fire: %v, to keep quiet: %v; want both", r.Alert, fires[r.Alert], quiet[r.Alert])
		}
	}
}

// ofShop matches the metrics of the API, of its guard and of credits.
var ofShop = regexp.MustCompile(`\b(credits|idem|http_request)_\w+`)

// TestShopIsApart checks that an outbox alone needs neither rules/shop.yml nor the dashboards of the shop: nothing else
// queries the shop's metrics.
func TestShopIsApart(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("prometheus/rules/*.yml")
	must(t, err)
	boards, err := filepath.Glob("dashboards/*.json")
	must(t, err)
	for _, name := range append(files, boards...) {
		text, err := os.ReadFile(name)
		must(t, err)
		found := ofShop.FindString(string(text))
		shop := slices.Contains([]string{"shop.yml", "api.json", "credits.json"}, filepath.Base(name))
		if shop != (found != "") {
			t.Errorf("%s has %q of the shop", name, found)
		}
	}
}
