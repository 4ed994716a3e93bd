package grafana

import (
	"os"
	"strings"
	"testing"
)

// TestTypesAreOne checks that make rules runs what the panels ask for, on a type that has several streams and on events
// of all services, and that no panel has a line for each stream.
func TestTypesAreOne(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("prometheus/tests/types.yml")
	must(t, err)
	tested := string(b)
	all := strings.NewReplacer("FILTER", `job=~".+"`, "$__rate_interval", "1m")
	for _, expr := range []string{
		byGroup("sum", "outbox_group_lag"),
		byGroup("max", "outbox_group_idle_seconds"),
		written,
	} {
		if want := "- expr: " + all.Replace(expr) + "\n"; !strings.Contains(tested, want) {
			t.Errorf("prometheus/tests/types.yml does not test %s", want)
		}
	}
	for _, b := range []board{overview, cdc, api, redis, drill} {
		for _, r := range b.rows {
			for _, p := range r.panels {
				for _, q := range p.queries {
					// That counter is of types anyway.
					if strings.Contains(q.legend, "{{stream}}") && !strings.Contains(q.expr, "outbox_published_total") {
						t.Errorf("%s, %s: a line for each stream: %s", b.file, p.title, q.expr)
					}
				}
			}
		}
	}
}
