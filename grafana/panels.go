package grafana

import (
	"fmt"
	"strings"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/variants"
	"github.com/grafana/grafana-foundation-sdk/go/common"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/heatmap"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/statetimeline"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

// form is how a panel looks.
type form int

const (
	lines  form = iota // values over time
	number             // one value, now or over the chosen range
	states             // states over time, one lane per series
	heat               // a histogram over time
)

// query is one query of a panel. In expr, FILTER stands for the matchers of job and instance.
type query struct{ expr, legend string }

// panel is one panel of a board. Its width is in columns of 24; 0 shares what is left of the row.
type panel struct {
	form  form
	title string
	// means describes what the panel shows and what to do when it rises.
	means string
	// alert names the section of the runbook that the panel links to; "" links to the whole page.
	alert   string
	unit    string
	queries []query
	steps   []step
	texts   map[string]text
	width   uint32
	// atMost is the upper end of the scale, 0 for none.
	atMost float64
	// empty is shown when there is no value.
	empty string
}

// step is a threshold: the colour applies from this value on.
type step struct {
	from  float64
	color string
}

// text is what a value is shown as.
type text struct{ say, color string }

const (
	green, orange, red, grey, blue = "green", "orange", "red", "text", "blue"

	filter = `job=~"$job", instance=~"$instance"`
)

// below makes thresholds: green below warn, orange from there, red from bad.
func below(warn, bad float64) []step { return []step{{0, green}, {warn, orange}, {bad, red}} }

// none makes thresholds for values that must stay 0.
func none() []step { return []step{{0, green}, {1, red}} }

// few makes thresholds for values that may rise occasionally.
func few() []step { return []step{{0, green}, {1, orange}} }

// leading is a gauge of the leading relay; the others export 0.
func leading(metric string) string {
	return fmt.Sprintf("max(%s{FILTER} and on (job, instance) outbox_relay_leader{FILTER} == 1)", metric)
}

// rate is the sum of a counter's rates, by labels if any are given.
func rate(metric string, by ...string) string { return perTime("rate", metric, "$__rate_interval", by) }

// jumps is the sum of a counter's increases from one point of a line to the next, by labels if any are given.
func jumps(metric string, by ...string) string {
	return perTime("increase", metric, "$__rate_interval", by)
}

// increase is the sum of a counter's increases within the chosen range, by labels if any are given.
func increase(metric string, by ...string) string { return perTime("increase", metric, "$__range", by) }

func perTime(function, metric, window string, by []string) string {
	name, matchers, found := strings.Cut(strings.TrimSuffix(metric, "}"), "{")
	if found {
		matchers += ", "
	}
	sum := "sum"
	if len(by) > 0 {
		sum += " by (" + strings.Join(by, ", ") + ") "
	}
	return fmt.Sprintf("%s(%s(%s{%sFILTER}[%s]))", sum, function, name, matchers, window)
}

// quantile is a quantile of a histogram, by labels if any are given.
func quantile(q float64, metric string, by ...string) string {
	name, matchers, found := strings.Cut(metric, "{")
	bucket := name + "_bucket"
	if found {
		bucket += "{" + matchers
	}
	return fmt.Sprintf("histogram_quantile(%g, %s)", q, rate(bucket, append([]string{"le"}, by...)...))
}

// byGroup is a gauge that the relay and the consumers both export, of each group on each type: of several streams the
// sum or the max.
func byGroup(function, metric string) string {
	return ofTypes(function, "max by (stream, group) ("+metric+"{FILTER}%s)", "group")
}

// ofTypes sums up values by stream, or finds the greatest, of the streams of each type, and by more labels if any are
// given. The label base names the type. Of which type a stream is the relay tells, because a type may itself be called
// like a stream of another one; where it does not, a stream is one of its own. A %s in values is where to leave out
// those below 0, which stand for unknown counts.
func ofTypes(function, values string, by ...string) string {
	known := ""
	if function == "sum" {
		known = " >= 0"
	}
	values = strings.ReplaceAll(values, "%s", known)
	const types = "topk by (stream) (1, max by (stream, base) (outbox_stream_info{FILTER}))"
	return function + " by (" + strings.Join(append([]string{"base"}, by...), ", ") + ") (" +
		values + " * on (stream) group_left (base) " + types + " or " +
		`label_replace(` + values + " unless on (stream) " + types + `, "base", "$1", "stream", "(.+)"))`
}

// source is the data source that the user selects.
var source = common.DataSourceRef{Type: cog.ToPtr("prometheus"), Uid: cog.ToPtr("${datasource}")}

func (p panel) expr(i int) string { return strings.ReplaceAll(p.queries[i].expr, "FILTER", filter) }

func (p panel) targets() []cog.Builder[variants.Dataquery] {
	var all []cog.Builder[variants.Dataquery]
	for i, q := range p.queries {
		t := prometheus.NewDataqueryBuilder().RefId(string(rune('A' + i))).Datasource(source).Expr(p.expr(i)).
			LegendFormat(q.legend).EditorMode(prometheus.QueryEditorModeCode)
		switch p.form {
		case number:
			t.Instant()
		case heat:
			t.Range().Format(prometheus.PromQueryFormatHeatmap)
		default:
			t.Range()
		}
		if p.form == lines && strings.Contains(q.expr, "_bucket{") {
			t.Exemplar(true)
		}
		all = append(all, t)
	}
	return all
}

func (p panel) thresholds() cog.Builder[dashboard.ThresholdsConfig] {
	steps := []dashboard.Threshold{{Color: green}}
	for i, s := range p.steps {
		if i == 0 { // the lowest step has no lower bound
			steps[0].Color = s.color
			continue
		}
		steps = append(steps, dashboard.Threshold{Value: cog.ToPtr(s.from), Color: s.color})
	}
	return dashboard.NewThresholdsConfigBuilder().Mode(dashboard.ThresholdsModeAbsolute).Steps(steps)
}

func (p panel) mappings() []dashboard.ValueMapping {
	var all []dashboard.ValueMapping
	if len(p.texts) > 0 {
		m := dashboard.NewValueMap()
		for value, t := range p.texts {
			m.Options[value] = dashboard.ValueMappingResult{Text: cog.ToPtr(t.say), Color: cog.ToPtr(t.color)}
		}
		all = append(all, dashboard.ValueMapping{ValueMap: m})
	}
	if p.empty != "" { // 0/0 is not a number, which would have the colour of the lowest threshold
		m := dashboard.NewSpecialValueMap()
		m.Options = dashboard.DashboardSpecialValueMapOptions{
			Match: dashboard.SpecialValueMatchNullAndNan, Result: dashboard.ValueMappingResult{
				Text:  cog.ToPtr(p.empty),
				Color: cog.ToPtr(grey),
			},
		}
		all = append(all, dashboard.ValueMapping{SpecialValueMap: m})
	}
	return all
}

// links lead to the runbook and to the description of the first metric.
func (p panel) links() []cog.Builder[dashboard.DashboardLink] {
	fix, meaning := link("Runbook: "+p.alert, runbook+strings.ToLower(p.alert)),
		link("Metric: "+p.metric(), reference+p.metric())
	if p.alert == "" {
		fix = link("Runbook", docs+"runbook.md")
	}
	if name := p.metric(); name == "up" || name == "ALERTS" { // Prometheus' own
		meaning = link("Metrics", docs+"metrics.md")
	}
	return []cog.Builder[dashboard.DashboardLink]{fix, meaning}
}

// metric is the first metric that the panel queries.
func (p panel) metric() string {
	name, _, _ := strings.Cut(p.queries[0].expr, "{")
	name = name[strings.LastIndexAny(name, " (")+1:]
	for _, suffix := range []string{"_bucket", "_count", "_sum"} {
		name = strings.TrimSuffix(name, suffix)
	}
	return name
}

func link(title, url string) *dashboard.DashboardLinkBuilder {
	return dashboard.NewDashboardLinkBuilder(title).Type(dashboard.DashboardLinkTypeLink).Url(url).TargetBlank(true)
}

// base is what every panel builder of the SDK has.
type base[B any] interface {
	cog.Builder[dashboard.Panel]
	Id(uint32) B
	Title(string) B
	Description(string) B
	Datasource(common.DataSourceRef) B
	GridPos(dashboard.GridPos) B
	Unit(string) B
	Min(float64) B
	Max(float64) B
	NoValue(string) B
	Links([]cog.Builder[dashboard.DashboardLink]) B
	Targets([]cog.Builder[variants.Dataquery]) B
	Thresholds(cog.Builder[dashboard.ThresholdsConfig]) B
	Mappings([]dashboard.ValueMapping) B
	ColorScheme(cog.Builder[dashboard.FieldColor]) B
}

// commonParts sets what panels of every form have.
func commonParts[B base[B]](b B, p panel, id uint32, at dashboard.GridPos) B {
	b.Id(id).Title(p.title).Description(p.means).Datasource(source).GridPos(at).Unit(p.unit).Links(p.links()).
		Targets(p.targets()).Thresholds(p.thresholds()).Mappings(p.mappings()).Min(0)
	if p.atMost > 0 {
		b.Max(p.atMost)
	}
	if p.empty != "" {
		b.NoValue(p.empty)
	}
	mode := dashboard.FieldColorModeIdThresholds
	if p.form == lines {
		mode = dashboard.FieldColorModeIdPaletteClassic
	}
	return b.ColorScheme(dashboard.NewFieldColorBuilder().Mode(mode))
}

// build makes the panel of the SDK.
func (p panel) build(id uint32, at dashboard.GridPos) cog.Builder[dashboard.Panel] {
	if p.form == number && p.empty == "" && strings.Contains(p.queries[0].expr, "outbox_relay_leader{FILTER} == 1") {
		p.empty = "no leader"
	}
	legend := common.NewVizLegendOptionsBuilder().DisplayMode(common.LegendDisplayModeList).
		Placement(common.LegendPlacementBottom).ShowLegend(p.form == lines)
	switch p.form {
	case number:
		return commonParts(stat.NewPanelBuilder(), p, id, at).ColorMode(common.BigValueColorModeBackground).
			GraphMode(common.BigValueGraphModeNone).Orientation(common.VizOrientationAuto).
			ReduceOptions(common.NewReduceDataOptionsBuilder().Calcs([]string{"lastNotNull"}))
	case states:
		return commonParts(statetimeline.NewPanelBuilder(), p, id,
			at).ShowValue(common.VisibilityModeAuto).MergeValues(true).
			RowHeight(0.9).FillOpacity(80).LineWidth(0).Legend(legend).
			Tooltip(common.NewVizTooltipOptionsBuilder().
				Mode(common.TooltipDisplayModeSingle).Sort(common.SortOrderNone))
	case heat:
		return commonParts(heatmap.NewPanelBuilder(), p, id, at).CellGap(1).ShowLegend().
			YAxis(heatmap.NewYAxisConfigBuilder().Unit(p.unit).AxisPlacement(common.AxisPlacementLeft)).
			Color(heatmap.NewHeatmapColorOptionsBuilder().
				Mode(heatmap.HeatmapColorModeScheme).Scheme("Oranges").Steps(64).Exponent(0.5).
				Fill("dark-orange")).
			Tooltip(heatmap.NewHeatmapTooltipBuilder().Mode(common.TooltipDisplayModeSingle))
	default:
		drawn := common.GraphThresholdsStyleModeOff
		if len(p.steps) > 1 {
			drawn = common.GraphThresholdsStyleModeDashed
		}
		return commonParts(timeseries.NewPanelBuilder(), p, id, at).LineWidth(1).FillOpacity(10).
			ShowPoints(common.VisibilityModeNever).Legend(legend).
			ThresholdsStyle(common.NewGraphThresholdsStyleConfigBuilder().Mode(drawn)).
			Tooltip(common.NewVizTooltipOptionsBuilder().
				Mode(common.TooltipDisplayModeMulti).Sort(common.SortOrderDescending))
	}
}
