// Package grafana generates the dashboards, and checks them and the Prometheus rules: every panel and alert queries
// metrics that posthaste has (docs/metrics.md, which is generated from its registries), with their labels, in valid
// PromQL.
//
// The boards are in overview.go, cdc.go, redis.go and drill.go, those of the shop in api.go and credits.go. make
// dashboards writes their JSON.
package grafana

import (
	"cmp"
	"encoding/json"
	"fmt"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

const (
	// docs is where Grafana serves this repository's docs folder: docker-compose.yml mounts it among Grafana's own
	// static files, which Grafana serves below /public. With another Grafana, put the folder there too, or change this
	// address. A dashboard variable does not work here: Grafana does not prefix such a link with the path it is served
	// under.
	docs      = "/public/posthaste/"
	runbook   = docs + "runbook.md#"
	reference = docs + "metrics.md#"

	tag = "posthaste"

	// ourJobs match our scrape jobs: a shared Prometheus has others, with metrics of the same names.
	ourJobs = "posthaste.*"
)

// board is one dashboard: its first row answers its question.
type board struct {
	file, title string
	// question is what the dashboard answers.
	question string
	rows     []row
}

// row is a heading and the panels below it, from left to right.
type row struct {
	title  string
	height uint32
	panels []panel
	// folded hides the panels at first: they are rarely needed.
	folded bool
}

// Dashboards returns the JSON of every dashboard by its file name.
func Dashboards() (map[string][]byte, error) {
	all := map[string][]byte{}
	for _, b := range []board{overview, cdc, redis, drill, api, creditsBoard} {
		d, err := b.build()
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", b.file, err)
		}
		text, err := json.MarshalIndent(d, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("dashboard %s: %w", b.file, err)
		}
		all[b.file+".json"] = append(text, '\n')
	}
	return all, nil
}

func (b board) build() (dashboard.Dashboard, error) { //nolint:staticcheck // classic JSON on purpose
	d := dashboard.NewDashboardBuilder("posthaste: " + b.title) //nolint:staticcheck // classic JSON on purpose
	d.Uid("posthaste-"+b.file).Description(b.question).Tags([]string{tag}).
		Readonly().Tooltip(dashboard.DashboardCursorSyncCrosshair).Refresh("30s").Time("now-15m",
		"now").Timezone("browser").Version(1)
	b.head(d)
	id, y := uint32(0), uint32(0)
	next := func() uint32 { id++; return id }
	for _, r := range b.rows {
		head := dashboard.NewRowBuilder(r.title).Id(next()).GridPos(dashboard.GridPos{X: 0, Y: y, W: columns, H: 1}).
			Collapsed(r.folded)
		y++
		var panels []cog.Builder[dashboard.Panel]
		x, at := uint32(0), y
		for i, p := range r.panels {
			w := cmp.Or(p.width, columns/3)
			panels = append(panels, p.build(next(), dashboard.GridPos{X: x, Y: at, W: w, H: r.height}))
			if x += w; x >= columns && i < len(r.panels)-1 {
				x, at = 0, at+r.height
			}
		}
		if r.folded { // the row contains its panels, and the next row is directly below it
			for _, p := range panels {
				head.WithPanel(p)
			}
			d.WithRow(head)
			continue
		}
		d.WithRow(head)
		for _, p := range panels {
			d.WithPanel(p)
		}
		y = at + r.height
	}
	made, err := d.Build()
	unhide(&made)
	return made, err
}

// unhide reverts the SDK's default of putting links and annotations into a menu.
func unhide(d *dashboard.Dashboard) { //nolint:staticcheck // as above
	for i := range d.Links {
		d.Links[i].Placement = nil
	}
	for _, p := range d.Panels {
		var panels []dashboard.Panel
		if p.Panel != nil {
			panels = append(panels, *p.Panel)
		} else {
			panels = p.RowPanel.Panels
		}
		for _, p := range panels {
			for i := range p.Links {
				p.Links[i].Placement = nil
			}
		}
	}
	for i := range d.Annotations.List {
		d.Annotations.List[i].Placement = nil
	}
}

const columns = 24

// head sets variables, links and annotations, the same on every dashboard.
func (b board) head(d *dashboard.DashboardBuilder) { //nolint:staticcheck // classic JSON on purpose
	text := func(s string) dashboard.StringOrArrayOfString { return dashboard.StringOrArrayOfString{String: &s} }
	all := dashboard.VariableOption{
		Text:  dashboard.StringOrArrayOfString{ArrayOfString: []string{"All"}},
		Value: dashboard.StringOrArrayOfString{ArrayOfString: []string{"$__all"}},
	}
	values := func(name, query, every string) *dashboard.QueryVariableBuilder {
		return dashboard.NewQueryVariableBuilder(name).Label(name).Datasource(source).Definition(query).
			Query(dashboard.StringOrMap{Map: map[string]any{"qryType": 1, "query": query, "refId": name}}).
			Refresh(dashboard.VariableRefreshOnTimeRangeChanged).Sort(dashboard.VariableSortAlphabeticalAsc).
			Multi(true).IncludeAll(true).AllValue(every).Current(all)
	}
	d.WithVariable(dashboard.NewDatasourceVariableBuilder("datasource").Label("Data source").Type("prometheus").
		Current(dashboard.VariableOption{Text: text("Prometheus"), Value: text("prometheus")})).
		WithVariable(values("job", `label_values(up{job=~"`+ourJobs+`"}, job)`, ourJobs)).
		WithVariable(values("instance", `label_values(up{job=~"$job"}, instance)`, ".+"))
	d.Link(dashboard.NewDashboardLinkBuilder("Dashboards").
		Type(dashboard.DashboardLinkTypeDashboards).Tags([]string{tag}).
		KeepTime(true).IncludeVars(true)).
		Link(link("Runbook", docs+"runbook.md")).
		Link(link("Metrics", docs+"metrics.md"))
	d.Annotation(dashboard.NewAnnotationQueryBuilder().
		Name("Mode switches").Datasource(source).Enable(true).IconColor(orange).
		Expr(`sum by (from, to, reason) (increase(outbox_mode_switches_total{` + filter + `}[1m])) > 0`).
		TitleFormat("{{from}} to {{to}}").TextFormat("{{reason}}").Step("15s"))
	d.Annotation(dashboard.NewAnnotationQueryBuilder().
		Name("New owner").Datasource(source).Enable(true).IconColor(blue).
		Expr(`changes(outbox_relay_epoch{` + filter + `}[1m]) > 0 and outbox_relay_leader{` + filter + `} == 1`).
		TitleFormat("{{instance}} leads").TextFormat("the epoch rises").Step("15s"))
}
