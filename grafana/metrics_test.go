// Package grafana checks the dashboards and the Prometheus rules in its folder: every panel and alert asks for metrics
// that posthaste has, with labels they carry, in valid PromQL.
package grafana

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql/parser"
)

type kind int

const (
	gauge kind = iota
	counter
	histogram
)

// metric is what dashboards and alerts may ask for.
type metric struct {
	kind   kind
	labels []string
}

// metrics are the contract's metrics, and those added since that a panel or an alert uses.
var metrics = map[string]metric{
	"outbox_published_total":              {counter, []string{"mode", "stream"}},
	"outbox_suppressed_total":             {counter, []string{"reason"}},
	"outbox_parked_total":                 {counter, nil},
	"outbox_commit_to_publish_seconds":    {histogram, []string{"mode"}},
	"outbox_publish_seconds":              {histogram, nil},
	"outbox_publish_errors_total":         {counter, []string{"class"}},
	"outbox_backlog_rows":                 {gauge, nil},
	"outbox_backlog_oldest_seconds":       {gauge, nil},
	"outbox_inflight_events":              {gauge, nil},
	"outbox_dead_rows":                    {gauge, nil},
	"outbox_relay_mode":                   {gauge, []string{"mode"}},
	"outbox_relay_desired_mode":           {gauge, []string{"mode"}},
	"outbox_relay_leader":                 {gauge, nil},
	"outbox_relay_epoch":                  {gauge, nil},
	"outbox_mode_switches_total":          {counter, []string{"from", "to", "reason"}},
	"outbox_slot_active":                  {gauge, nil},
	"outbox_slot_retained_bytes":          {gauge, nil},
	"outbox_slot_confirmed_lag_bytes":     {gauge, nil},
	"outbox_slot_lost":                    {gauge, nil},
	"outbox_slot_max_keep_bytes":          {gauge, nil},
	"outbox_wire_idle_seconds":            {gauge, nil},
	"outbox_stream_length":                {gauge, []string{"stream"}},
	"outbox_group_pending":                {gauge, []string{"stream", "group"}},
	"outbox_group_lag":                    {gauge, []string{"stream", "group"}},
	"outbox_group_oldest_pending_seconds": {gauge, []string{"stream", "group"}},
	"outbox_group_idle_seconds":           {gauge, []string{"stream", "group"}},
	"outbox_trim_lost_total":              {counter, []string{"stream", "group"}},
	"outbox_events_written_total":         {counter, []string{"type"}},
	"outbox_scrape_errors_total":          {counter, []string{"collector"}},
	"redis_memory_ratio":                  {gauge, nil},
	"redis_eviction_unsafe":               {gauge, nil},
	"idem_requests_total":                 {counter, []string{"route", "outcome"}},
	"idem_script_seconds":                 {histogram, []string{"script"}},
	"http_request_duration_seconds":       {histogram, []string{"route", "method", "status"}},
	"outbox_audit_failures_total":         {counter, []string{"reason"}},
	"outbox_consumer_dead_total":          {counter, []string{"group"}},
	"credits_ops_total":                   {counter, []string{"code"}},
	"credits_sync_lag_seconds":            {gauge, nil},
	"credits_lost_operations_total":       {counter, nil},
	"credits_epoch_bumps_total":           {counter, nil},
	"credits_frozen_total":                {counter, []string{"reason"}},
	"up":                                  {gauge, nil},
}

// find returns the metric behind a series name, and the labels the series has.
func find(series string) (metric, []string, bool) {
	common := []string{"job", "instance"}
	if strings.Contains(series, ":") { // a recording rule; TestRules looks for it
		return metric{gauge, nil}, nil, true
	}
	if m, ok := metrics[series]; ok && m.kind != histogram {
		return m, append(common, m.labels...), true
	}
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		base, cut := strings.CutSuffix(series, suffix)
		if m, ok := metrics[base]; cut && ok && m.kind == histogram {
			if suffix == "_bucket" {
				common = append(common, "le")
			}
			return m, append(common, m.labels...), true
		}
	}
	return metric{}, nil, false
}

// TestMetricsAreExported finds the name of every metric above in the code: a renamed metric would leave a panel empty.
func TestMetricsAreExported(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	err := filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		b, err := os.ReadFile(path)
		code.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range metrics {
		if name != "up" && !strings.Contains(code.String(), `"`+name+`"`) {
			t.Errorf("no code exports %s", name)
		}
	}
}

// Grafana replaces these before it asks; any value will do for parsing.
var (
	intervals = strings.NewReplacer("$__rate_interval", "1m", "$__interval", "1m", "$__range", "1h")
	variables = regexp.MustCompile(`\$[a-z]+`)
)

// check returns what is wrong with a query.
func check(query string) []string {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(variables.ReplaceAllString(intervals.Replace(query), ".*"))
	if err != nil {
		return []string{err.Error()}
	}
	var faults []string
	parser.Inspect(expr, func(n parser.Node, path []parser.Node) error {
		switch n := n.(type) {
		case *parser.VectorSelector:
			faults = append(faults, checkSelector(n, path)...)
		case *parser.AggregateExpr:
			faults = append(faults, checkLabels(n.Expr, n.Grouping)...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				faults = append(faults, checkLabels(n.LHS, n.VectorMatching.MatchingLabels)...)
				faults = append(faults, checkLabels(n.RHS, n.VectorMatching.MatchingLabels)...)
			}
		}
		return nil
	})
	return faults
}

// checkSelector: the metric exists, the matchers name its labels, and a counter is only ever seen through a rate.
func checkSelector(s *parser.VectorSelector, path []parser.Node) (faults []string) {
	m, has, ok := find(s.Name)
	if !ok {
		return []string{fmt.Sprintf("%s: no such metric", s.Name)}
	}
	for _, l := range s.LabelMatchers {
		if l.Name != model.MetricNameLabel && !slices.Contains(has, l.Name) {
			faults = append(faults, fmt.Sprintf("%s has no label %s", s.Name, l.Name))
		}
	}
	rated := slices.ContainsFunc(path, func(n parser.Node) bool {
		c, ok := n.(*parser.Call)
		return ok && slices.Contains([]string{"rate", "irate", "increase"}, c.Func.Name)
	})
	if rated == (m.kind == gauge) {
		faults = append(faults, fmt.Sprintf("%s: counters go through rate or increase, gauges do not", s.Name))
	}
	return faults
}

// checkLabels: every series below expr has the labels that it is grouped or matched by.
func checkLabels(expr parser.Node, wanted []string) (faults []string) {
	parser.Inspect(expr, func(n parser.Node, path []parser.Node) error {
		s, ok := n.(*parser.VectorSelector)
		if !ok || filters(path, s) {
			return nil
		}
		_, has, _ := find(s.Name)
		for _, l := range wanted {
			if !slices.Contains(has, l) {
				faults = append(faults, fmt.Sprintf("%s has no label %s to group or match by", s.Name, l))
			}
		}
		return nil
	})
	return faults
}

// filters reports whether s only selects what passes: it is on the right of an "and" or "unless" within path, so that
// its labels go nowhere.
func filters(path []parser.Node, s *parser.VectorSelector) bool {
	return slices.ContainsFunc(path, func(n parser.Node) bool {
		b, ok := n.(*parser.BinaryExpr)
		return ok && (b.Op == parser.LAND || b.Op == parser.LUNLESS) && contains(b.RHS, s)
	})
}

func contains(expr parser.Node, s *parser.VectorSelector) (found bool) {
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		found = found || n == parser.Node(s)
		return nil
	})
	return found
}

// TestCheck shows that the checks above see what they are for.
func TestCheck(t *testing.T) {
	t.Parallel()
	for query, ok := range map[string]bool{
		`sum by (mode) (rate(outbox_published_total{job=~"$job"}[$__rate_interval]))`:     true,
		`max(outbox_backlog_rows and on (job, instance) outbox_relay_leader == 1)`:        true,
		`max by (stream) (outbox_stream_length unless on (job) outbox_relay_leader == 0)`: true,
		`max by (stream) (outbox_relay_leader unless on (job) outbox_stream_length == 0)`: false, // no such label
		`outbox_dead_rows and on (stream) outbox_relay_leader == 1`:                       false, // no such label
		`histogram_quantile(0.5, sum by (le) (rate(outbox_publish_seconds_bucket[5m])))`:  true,
		`sum by (mode) (rate(outbox_published_total[5m])`:                                 false, // does not parse
		`rate(outbox_publised_total[5m])`:                                                 false, // no such metric
		`rate(outbox_published_total{type="x"}[5m])`:                                      false, // no such label
		`sum by (topic) (rate(outbox_published_total[5m]))`:                               false, // no such label
		`outbox_published_total`:                               false, // a counter as it is
		`rate(outbox_backlog_rows[5m])`:                        false, // the rate of a gauge
		`rate(outbox_publish_seconds[5m])`:                     false, // a histogram has no series of its own name
		`sum by (le) (rate(outbox_publish_seconds_count[5m]))`: false, // le is the buckets'
	} {
		if faults := check(query); (len(faults) == 0) != ok {
			t.Errorf("%s: got %v, want it to pass: %v", query, faults, ok)
		}
	}
}
