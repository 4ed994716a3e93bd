package gendocs

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"posthaste/internal/app"
	"posthaste/outbox"
)

// openLabels are the labels whose values are unknown at the start, with the bounds of their number.
var openLabels = map[string]string{
	"stream":  "a stream, at most 200 of them",
	"group":   "a consumer group",
	"version": "the build",
}

// exported is a metric as the processes export it.
type exported struct {
	name, kind, help string
	processes        []string
	// labels are in the order of the declaration; values has those that exist from the start.
	labels []string
	values map[string][]string
	// bounds are a histogram's buckets.
	bounds []float64
}

// exportedMetrics reads the registry of every process.
func exportedMetrics(ctx context.Context, c app.Config) (map[string]*exported, error) {
	all := map[string]*exported{}
	err := app.EachRegistry(ctx, c, func(process string, reg *prometheus.Registry) error {
		if err := collect(all, process, reg); err != nil {
			return fmt.Errorf("metrics of %s: %w", process, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// descPattern parses a description's text: a Desc has no accessors.
var descPattern = regexp.MustCompile(`^Desc\{fqName: "(.*?)", help: "(.*)", unit: ".*", constLabels: \{.*\}, ` +
	`variableLabels: \{(.*)\}\}$`)

// collect adds the registry's metrics to all, except those that every Go program has.
func collect(all map[string]*exported, process string, reg *prometheus.Registry) error {
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		reg.Describe(descs)
	}()
	var mine []*exported
	var unread error
	for d := range descs { // drained, or the registry's goroutine would leak
		m := descPattern.FindStringSubmatch(d.String())
		if m == nil {
			unread = fmt.Errorf("description %s", d)
			continue
		}
		name := m[1]
		x := all[name]
		if x == nil {
			x = &exported{
				name: name, kind: "gauge", help: strings.ReplaceAll(m[2], `\"`, `"`), values: map[string][]string{},
			}
			if m[3] != "" {
				x.labels = strings.Split(m[3], ",")
			}
			if strings.HasSuffix(name, "_total") { // promlinter checks that exactly the counters end so
				x.kind = "counter"
			}
			all[name] = x
		}
		if !slices.Contains(x.processes, process) {
			x.processes = append(x.processes, process)
			mine = append(mine, x)
		}
	}
	if unread != nil {
		return unread
	}
	families, err := reg.Gather()
	if err != nil {
		return err
	}
	for _, x := range mine {
		for _, f := range families {
			if f.GetName() == x.name {
				x.add(f)
			}
		}
	}
	return nil
}

// add adds the metric's initial state in a registry.
func (x *exported) add(f *dto.MetricFamily) {
	x.kind = strings.ToLower(f.GetType().String())
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if !slices.Contains(x.values[l.GetName()], l.GetValue()) {
				x.values[l.GetName()] = append(x.values[l.GetName()], l.GetValue())
			}
		}
		if x.bounds == nil {
			for _, b := range m.GetHistogram().GetBucket() {
				x.bounds = append(x.bounds, b.GetUpperBound())
			}
		}
	}
}

// metricNotes are the sections of docs/metrics.md, in order: a title, and for each metric its name, the meaning of a
// rise with the remedy, and a PromQL query on the last line. The tests in grafana parse the queries and check their
// metrics and labels.
//
//go:embed notes.txt
var metricNotes string

// metricsIntro is the beginning of docs/metrics.md.
//
//go:embed metrics.txt
var metricsIntro string

// metricsReference is docs/metrics.md.
func metricsReference(ctx context.Context, c app.Config) (string, error) {
	all, err := exportedMetrics(ctx, c)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(metricsIntro)
	for block := range strings.SplitSeq(strings.TrimSpace(metricNotes), "\n\n") {
		if title, ok := strings.CutPrefix(block, "## "); ok {
			fmt.Fprintf(&b, "\n## %s\n\n| metric | meaning | query |\n|---|---|---|\n", title)
			continue
		}
		lines := strings.Split(block, "\n")
		name, query := lines[0], lines[len(lines)-1]
		switch x := all[name]; {
		case len(lines) < 3 || !strings.Contains(query, name):
			return "", fmt.Errorf("internal/gendocs/notes.txt: %s needs a text and a query of itself", name)
		case x == nil:
			return "", fmt.Errorf("internal/gendocs/notes.txt describes %s, which no process exports", name)
		default:
			delete(all, name)
			x.write(&b, strings.Join(lines[1:len(lines)-1], " "), query)
		}
	}
	if len(all) > 0 {
		return "", fmt.Errorf("internal/gendocs/notes.txt says nothing about %s",
			strings.Join(slices.Sorted(maps.Keys(all)), ", "))
	}
	return b.String(), nil
}

// write writes the metric's row. Links of the dashboards lead to its id.
func (x *exported) write(b *strings.Builder, rise, query string) {
	kind := x.kind + " of " + codeList(x.processes)
	for i, l := range x.labels {
		kind += fmt.Sprintf("%s `%s`: %s", map[bool]string{true: "; by", false: ", by"}[i == 0], l, x.labelText(l))
	}
	meaning := x.help
	if len(x.bounds) > 0 {
		var bounds []string
		for _, v := range x.bounds {
			bounds = append(bounds, fmt.Sprintf("%g", v))
		}
		meaning += "<br>Buckets: " + strings.Join(bounds, ", ") + "."
	}
	fmt.Fprintf(b, "| <a id=\"%s\"></a>`%s`<br>%s | %s<br>**A rise:** %s | `%s` |\n", x.name, x.name, kind,
		cell(meaning), cell(rise), cell(query))
}

func (x *exported) labelText(label string) string {
	if bound, ok := openLabels[label]; ok {
		return bound
	}
	if len(x.values[label]) == 0 { // its series are created with the stream, in both modes at once
		return codeList([]string{string(outbox.ModeCDC), string(outbox.ModePoll)})
	}
	return codeList(slices.Sorted(slices.Values(x.values[label])))
}

// codeList formats names as code, in prose: a, b and c.
func codeList(names []string) string {
	text := "`" + strings.Join(names, "`, `") + "`"
	if last := strings.LastIndex(text, ", "); last >= 0 {
		return text[:last] + " and " + text[last+2:]
	}
	return text
}
