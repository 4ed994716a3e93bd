package grafana

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
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

// metric is a metric that dashboards and alerts may query.
type metric struct {
	kind   kind
	labels []string
	// values has those of the closed labels, and of le.
	values map[string][]string
}

var (
	metricPage = regexp.MustCompile("(?m)^\\| <a id=\"(\\w+)\"></a>`\\w+`<br>(gauge|counter|histogram) of " +
		"(.+?) \\| (.+?) \\| `(.+)` \\|$")
	labelText  = regexp.MustCompile("[;,]\\s+by\\s+`([a-z]+)`:\\s+")
	inCode     = regexp.MustCompile("`([^`]+)`")
	bucketList = regexp.MustCompile(`<br>Buckets: (.*?)\.<br>`)
)

// metrics are those of docs/metrics.md, which is generated from the registries of the processes, and those that
// Prometheus and its client libraries export.
var metrics = sync.OnceValue(func() map[string]metric {
	all := map[string]metric{
		"up":      {kind: gauge},
		"ALERTS":  {kind: gauge, labels: []string{"alertname", "alertstate", "severity"}},
		startedAt: {kind: gauge},
	}
	b, err := os.ReadFile("../docs/metrics.md")
	if err != nil {
		panic(err)
	}
	for _, m := range metricPage.FindAllStringSubmatch(string(b), -1) {
		one := metric{
			kind:   map[string]kind{"gauge": gauge, "counter": counter, "histogram": histogram}[m[2]],
			values: map[string][]string{},
		}
		at := labelText.FindAllStringSubmatchIndex(m[3], -1)
		for i, l := range at {
			end := len(m[3])
			if i+1 < len(at) {
				end = at[i+1][0]
			}
			label := m[3][l[2]:l[3]]
			one.labels = append(one.labels, label)
			for _, v := range inCode.FindAllStringSubmatch(m[3][l[1]:end], -1) {
				one.values[label] = append(one.values[label], v[1])
			}
		}
		if bounds := bucketList.FindStringSubmatch(m[4]); bounds != nil {
			one.values["le"] = append(strings.Split(bounds[1], ", "), "+Inf")
		}
		all[m[1]] = one
	}
	return all
})

// TestPageOfMetrics checks that the page parses as intended, and that each query on it is valid.
func TestPageOfMetrics(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../docs/metrics.md")
	must(t, err)
	rows := metricPage.FindAllStringSubmatch(string(b), -1)
	if n := strings.Count(string(b), "<a id="); n != len(rows) || n < 60 {
		t.Fatalf("%d rows, of which %d are read", n, len(rows))
	}
	for _, m := range rows {
		for _, fault := range check(m[5]) {
			t.Errorf("%s: %s: %s", m[1], m[5], fault)
		}
	}
	got, want := metrics()["outbox_commit_to_publish_seconds"], metric{histogram, []string{"mode"}, map[string][]string{
		"mode": {"cdc", "poll"},
		"le": {
			"0.0005", "0.0015", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1.5", "2.5", "5.5",
			"15.5", "60.5", "300.5", "+Inf",
		},
	}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read %v, want %v", got, want)
	}
	if got := metrics()["outbox_published_total"]; !slices.Equal(got.labels, []string{"mode", "stream"}) ||
		got.values["stream"] != nil {
		t.Errorf("read %v, want the labels mode and stream, which is open", got)
	}
}

// startedAt selects processes that started recently, whose counts are recent.
const startedAt = "process_start_time_seconds"

// find returns the metric behind a series name, and the labels the series has.
func find(series string) (metric, []string, bool) {
	common := []string{"job", "instance"}
	if strings.Contains(series, ":") { // a recording rule; TestRules looks for it
		return metric{kind: gauge}, nil, true
	}
	if m, ok := metrics()[series]; ok && m.kind != histogram {
		return m, append(common, m.labels...), true
	}
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		base, cut := strings.CutSuffix(series, suffix)
		if m, ok := metrics()[base]; cut && ok && m.kind == histogram {
			if suffix == "_bucket" {
				common = append(common, "le")
			}
			return m, append(common, m.labels...), true
		}
	}
	return metric{}, nil, false
}

// Grafana replaces these before it queries; for parsing, any value works.
var (
	intervals = strings.NewReplacer("$__rate_interval", "1m", "$__interval", "1m", "$__range", "1h")
	variables = regexp.MustCompile(`\$[a-z]+`)
)

// check returns what is wrong with a query.
func check(query string) []string {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(variables.ReplaceAllString(intervals.Replace(query),
		".*"))
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
				faults = append(faults, checkLabels(n.RHS,
					slices.Concat(n.VectorMatching.MatchingLabels, n.VectorMatching.Include))...)
			}
		}
		return nil
	})
	return faults
}

// checkSelector checks that the metric exists, that the matchers name its labels, and that a counter is only used in a
// rate, or while its process is young.
func checkSelector(s *parser.VectorSelector, path []parser.Node) (faults []string) {
	m, has, ok := find(s.Name)
	if !ok {
		return []string{fmt.Sprintf("%s: no such metric", s.Name)}
	}
	for _, l := range s.LabelMatchers {
		if l.Name != model.MetricNameLabel && !slices.Contains(has, l.Name) {
			faults = append(faults, fmt.Sprintf("%s has no label %s", s.Name, l.Name))
		}
		if values, closed := m.values[l.Name]; closed && len(values) > 0 && !slices.ContainsFunc(values, l.Matches) {
			faults = append(faults, fmt.Sprintf("%s: no %s matches %s", s.Name, l.Name, l.Value))
		}
	}
	rated := slices.ContainsFunc(path, func(n parser.Node) bool {
		c, ok := n.(*parser.Call)
		return ok && slices.Contains([]string{"rate", "irate", "increase"}, c.Func.Name)
	})
	young := m.kind == counter && ofTheYoung(path, s)
	if rated == (m.kind == gauge) && !young {
		faults = append(faults, fmt.Sprintf("%s: counters go through rate or increase, gauges do not", s.Name))
	}
	return faults
}

// ofTheYoung reports whether s is on the left of an "and" whose right side looks at the start of the processes.
func ofTheYoung(path []parser.Node, s *parser.VectorSelector) bool {
	return slices.ContainsFunc(path, func(n parser.Node) bool {
		b, ok := n.(*parser.BinaryExpr)
		return ok && b.Op == parser.LAND && contains(b.LHS, s) && strings.Contains(b.RHS.String(), startedAt)
	})
}

// checkLabels checks that every series below expr has the labels that it is grouped or matched by.
func checkLabels(expr parser.Node, wanted []string) (faults []string) {
	parser.Inspect(expr, func(n parser.Node, path []parser.Node) error {
		s, ok := n.(*parser.VectorSelector)
		if !ok || filters(path, s) {
			return nil
		}
		_, has, _ := find(s.Name)
		has = append(has, joined(path, s)...)
		for _, l := range wanted {
			if !slices.Contains(has, l) {
				faults = append(faults, fmt.Sprintf("%s has no label %s to group or match by", s.Name, l))
			}
		}
		return nil
	})
	return faults
}

// joined returns the labels that s gets within path: by group_left from what it is joined with, by label_replace.
func joined(path []parser.Node, s *parser.VectorSelector) (labels []string) {
	for _, n := range path {
		b, ok := n.(*parser.BinaryExpr)
		if ok && b.VectorMatching != nil && b.VectorMatching.Card == parser.CardManyToOne && contains(b.LHS, s) {
			labels = append(labels, b.VectorMatching.Include...)
		}
		if c, ok := n.(*parser.Call); ok && c.Func.Name == "label_replace" {
			if dst, ok := c.Args[1].(*parser.StringLiteral); ok {
				labels = append(labels, dst.Val)
			}
		}
	}
	return labels
}

// filters reports whether s is only a filter: it is on the right of an "and", "unless" or group_left within path, so
// that the result has none of its labels, except those that group_left names.
func filters(path []parser.Node, s *parser.VectorSelector) bool {
	return slices.ContainsFunc(path, func(n parser.Node) bool {
		b, ok := n.(*parser.BinaryExpr)
		return ok && contains(b.RHS, s) && (b.Op == parser.LAND || b.Op == parser.LUNLESS ||
			b.VectorMatching != nil && b.VectorMatching.Card == parser.CardManyToOne)
	})
}

func contains(expr parser.Node, s *parser.VectorSelector) (found bool) {
	parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
		found = found || n == parser.Node(s)
		return nil
	})
	return found
}

// TestCheck checks that the checks above detect what they are for.
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
		`rate(outbox_published_total{mode="pol"}[5m])`:                                    false, // no such value
		`rate(outbox_publish_seconds_bucket{le="1"}[5m])`:                                 false, // no such bucket
		`rate(outbox_published_total{mode=~"cdc|x",stream="outbox.any"}[5m])`:             true,
		`rate(outbox_published_total{type="x"}[5m])`:                                      false, // no such label
		`sum by (topic) (rate(outbox_published_total[5m]))`:                               false, // no such label
		// a label of another metric
		`sum by (source) (outbox_relay_leader * on (job, instance) group_left (source) outbox_relay_info)`: true,
		`sum by (shared) (outbox_relay_leader * on (job, instance) group_left (source) outbox_relay_info)`: false,
		`sum by (x) (label_replace(outbox_relay_leader, "x", "$1", "job", "(.+)"))`:                        true,
		`sum by (y) (label_replace(outbox_relay_leader, "x", "$1", "job", "(.+)"))`:                        false,
		// a counter as it is
		`outbox_published_total`: false,
		`outbox_published_total and on (job, instance) outbox_relay_leader == 1`:               false, // the same
		`outbox_parked_total and on (job, instance) time() - process_start_time_seconds < 600`: true,
		// the rate of a gauge
		`rate(outbox_backlog_rows[5m])`: false,
		// a histogram has no series of its own name
		`rate(outbox_publish_seconds[5m])`: false,
		// le is the buckets'
		`sum by (le) (rate(outbox_publish_seconds_count[5m]))`: false,
	} {
		if faults := check(query); (len(faults) == 0) != ok {
			t.Errorf("%s: got %v, want it to pass: %v", query, faults, ok)
		}
	}
}
