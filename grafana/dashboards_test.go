package grafana

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/goccy/go-yaml"
)

type jsonSource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type jsonTarget struct {
	RefID      string     `json:"refId"`
	Datasource jsonSource `json:"datasource"`
	Expr       string     `json:"expr"`
}

type jsonLink struct {
	Title string   `json:"title"`
	Type  string   `json:"type"`
	URL   string   `json:"url"`
	Tags  []string `json:"tags"`
}

type jsonPanel struct {
	ID          int                      `json:"id"`
	Type        string                   `json:"type"`
	Title       string                   `json:"title"`
	Description string                   `json:"description"`
	Datasource  jsonSource               `json:"datasource"`
	GridPos     struct{ X, Y, W, H int } `json:"gridPos"`
	Targets     []jsonTarget             `json:"targets"`
	Links       []jsonLink               `json:"links"`
	Panels      []jsonPanel              `json:"panels"`
	FieldConfig struct {
		Defaults struct {
			Unit       string `json:"unit"`
			Thresholds struct {
				Steps []struct{ Value *float64 } `json:"steps"`
			} `json:"thresholds"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

type jsonVariable struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Query      json.RawMessage `json:"query"`
	Refresh    int             `json:"refresh"`
	AllValue   string          `json:"allValue"`
	Datasource jsonSource      `json:"datasource"`
	Current    struct {
		Value any `json:"value"`
	} `json:"current"`
}

type jsonDashboard struct {
	UID           string      `json:"uid"`
	Title         string      `json:"title"`
	Description   string      `json:"description"`
	Editable      *bool       `json:"editable"`
	SchemaVersion int         `json:"schemaVersion"`
	Refresh       string      `json:"refresh"`
	Tags          []string    `json:"tags"`
	Links         []jsonLink  `json:"links"`
	Panels        []jsonPanel `json:"panels"`
	Annotations   struct {
		List []struct {
			Datasource jsonSource `json:"datasource"`
			Expr       string     `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
	Templating struct {
		List []jsonVariable `json:"list"`
	} `json:"templating"`
}

// templated is the data source that the user selected.
var templated = jsonSource{Type: "prometheus", UID: "${datasource}"}

// each runs f as a test of every dashboard.
func each(t *testing.T, f func(t *testing.T, d jsonDashboard)) {
	t.Helper()
	files, err := filepath.Glob("dashboards/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no dashboards: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			b, err := os.ReadFile(file)
			must(t, err)
			var d jsonDashboard
			must(t, json.Unmarshal(b, &d))
			d.Panels = unfolded(d.Panels)
			f(t, d)
		})
	}
}

// unfolded lists the panels of folded rows behind their rows, at the places that they have when all rows are open.
func unfolded(panels []jsonPanel) (all []jsonPanel) {
	moved := 0
	for _, p := range panels {
		p.GridPos.Y += moved
		end := p.GridPos.Y + 1
		inside := p.Panels
		p.Panels = nil
		all = append(all, p)
		for _, q := range inside {
			q.GridPos.Y += moved
			end = max(end, q.GridPos.Y+q.GridPos.H)
			all = append(all, q)
		}
		moved += end - p.GridPos.Y - 1
	}
	return all
}

// TestDashboardsAreGenerated checks that the committed files are exactly what the code generates.
func TestDashboardsAreGenerated(t *testing.T) {
	t.Parallel()
	want, err := Dashboards()
	must(t, err)
	files, err := filepath.Glob("dashboards/*")
	must(t, err)
	for _, file := range files {
		have, err := os.ReadFile(file)
		must(t, err)
		if text, ok := want[filepath.Base(file)]; !ok || !bytes.Equal(have, text) {
			t.Errorf("%s is not what the code makes: run make dashboards", file)
		}
		delete(want, filepath.Base(file))
	}
	for name := range want {
		t.Errorf("dashboards/%s is missing: run make dashboards", name)
	}
}

func TestDashboardHead(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d jsonDashboard) {
		if d.UID == "" || d.Title == "" || d.Description == "" || d.SchemaVersion == 0 {
			t.Errorf("uid %q, title %q, description %q, schema %d: none may be empty", d.UID, d.Title, d.Description,
				d.SchemaVersion)
		}
		if d.Refresh != "30s" {
			t.Errorf("refreshed every %s, want 30s: each page repeats all queries", d.Refresh)
		}
		if d.Editable == nil || *d.Editable {
			t.Error("editable: the files are the source, so a change in the browser would be lost")
		}
		if !slices.ContainsFunc(d.Links, func(l jsonLink) bool {
			return l.Type == "dashboards" &&
				slices.Equal(l.Tags, d.Tags)
		}) {
			t.Errorf("links %v do not lead to the other dashboards, by the tags %v", d.Links, d.Tags)
		}
		for _, l := range d.Links {
			checkLink(t, d.Title, l)
		}
		if len(d.Annotations.List) == 0 {
			t.Error("no annotations: switches of the mode explain most of what one sees")
		}
		for _, a := range d.Annotations.List {
			if a.Datasource != templated {
				t.Errorf("annotation %s: data source %+v is not the chosen one", a.Expr, a.Datasource)
			}
			for _, fault := range check(a.Expr) {
				t.Errorf("annotation %s: %s", a.Expr, fault)
			}
		}
	})
}

func TestDashboardVariables(t *testing.T) {
	t.Parallel()
	uid := provisioned(t)
	each(t, func(t *testing.T, d jsonDashboard) {
		var names []string
		for _, v := range d.Templating.List {
			names = append(names, v.Name)
			switch v.Type {
			case "datasource":
				if string(v.Query) != `"prometheus"` || v.Current.Value != uid {
					t.Errorf("%s: of type %s, at first %v; want Prometheus, and %s", v.Name, v.Query, v.Current.Value,
						uid)
				}
			case "query":
				if v.Datasource != templated || v.Refresh != 2 {
					t.Errorf("%s: data source %+v, refresh %d; want the chosen one, and 2 (when the time range "+
						"changes)", v.Name, v.Datasource, v.Refresh)
				}
				if v.Name == "job" && v.AllValue != ourJobs {
					t.Errorf("%s: all are %q, which is everybody's http_request_duration_seconds, too; want %q", v.Name,
						v.AllValue, ourJobs)
				}
			default:
				t.Errorf("%s: variable of type %s", v.Name, v.Type)
			}
		}
		for _, want := range []string{"datasource", "job", "instance"} {
			if !slices.Contains(names, want) {
				t.Errorf("variables %v: %s is missing", names, want)
			}
		}
	})
}

// provisioned returns the uid of the data source that Grafana is started with.
func provisioned(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("provisioning/datasources/prometheus.yml")
	must(t, err)
	var f struct {
		Datasources []struct {
			UID string `yaml:"uid"`
		} `yaml:"datasources"`
	}
	if err := yaml.Unmarshal(b, &f); err != nil || len(f.Datasources) != 1 {
		t.Fatalf("data sources: %+v, %v; want one", f, err)
	}
	return f.Datasources[0].UID
}

func TestDashboardPanels(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d jsonDashboard) {
		ids := map[int]string{}
		for _, p := range d.Panels {
			if other, ok := ids[p.ID]; ok || p.ID == 0 {
				t.Errorf("%s: id %d is zero or also that of %q", p.Title, p.ID, other)
			}
			ids[p.ID] = p.Title
			if p.Title == "" {
				t.Errorf("panel %d has no title", p.ID)
			}
			if p.Type == "row" {
				continue
			}
			if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 {
				t.Errorf("%s: description %q, unit %q, %d queries: none may be empty", p.Title, p.Description,
					p.FieldConfig.Defaults.Unit, len(p.Targets))
			}
			if p.Datasource != templated {
				t.Errorf("%s: data source %+v is not the chosen one", p.Title, p.Datasource)
			}
			checkTargets(t, p)
			checkAdvice(t, p)
		}
	})
}

// checkAdvice checks that a panel describes what it shows and what to do, and links to the runbook and to its metric.
func checkAdvice(t *testing.T, p jsonPanel) {
	t.Helper()
	if len(p.Description) < 60 || !strings.HasSuffix(p.Description, ".") {
		t.Errorf("%s: the description %q does not say what to do", p.Title, p.Description)
	}
	if p.Type == "stat" && len(p.FieldConfig.Defaults.Thresholds.Steps) == 0 {
		t.Errorf("%s: no thresholds", p.Title)
	}
	for i, s := range p.FieldConfig.Defaults.Thresholds.Steps {
		if (i == 0) != (s.Value == nil) {
			t.Errorf("%s: threshold %d begins at %v; only the lowest has no beginning", p.Title, i, s.Value)
		}
	}
	if len(p.Links) != 2 || !strings.HasPrefix(p.Links[0].URL, docs+"runbook.md") ||
		!strings.HasPrefix(p.Links[1].URL, docs+"metrics.md") {
		t.Errorf("%s: links %v, want one into the runbook and one to the metric", p.Title, p.Links)
	}
	for _, l := range p.Links {
		checkLink(t, p.Title, l)
	}
}

var pageHeadings = sync.OnceValue(func() map[string]bool {
	all := map[string]bool{}
	for _, page := range []string{"runbook.md", "metrics.md"} {
		b, err := os.ReadFile(filepath.Join("..", "docs", page))
		if err != nil {
			panic(err)
		}
		all[docs+page] = true
		place := regexp.MustCompile(`(?m)^(?:### |\| <a id=")(\w+)(?:"|$)`)
		for _, m := range place.FindAllStringSubmatch(string(b), -1) {
			all[docs+page+"#"+strings.ToLower(m[1])] = true
		}
	}
	return all
})

// checkLink checks that a link leads to one of our pages, and to a heading on it.
func checkLink(t *testing.T, title string, l jsonLink) {
	t.Helper()
	if l.Type == "link" && !pageHeadings()[l.URL] {
		t.Errorf("%s: %s leads nowhere", title, l.URL)
	}
}

// unshown are the metrics without a panel, with the reason.
var unshown = map[string]string{
	"posthaste_build_info": "a version is not a curve",
	startedAt:              "alerts ask it which processes are young",
	"tls_certificate_expiry_timestamp_seconds": "an alert asks it; a date is not a curve",
	"tls_files_rejected_total":                 "what comes of it is an alert",
}

// TestEveryMetricHasAPanel checks that a panel shows every metric.
func TestEveryMetricHasAPanel(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	boards, err := Dashboards()
	must(t, err)
	for _, b := range boards {
		all.Write(b)
	}
	for name := range metrics() {
		shown := regexp.MustCompile(`\b` + name + `(?:_bucket|_count|_sum)?\{`).MatchString(all.String())
		switch _, excused := unshown[name]; {
		case !shown && !excused:
			t.Errorf("%s: no panel has it; add a query to one, or a reason to unshown", name)
		case shown && excused:
			t.Errorf("%s is on a panel: take it out of unshown", name)
		}
	}
}

// TestFirstRowAnswers checks that numbers in the first row answer the question of the dashboard.
func TestFirstRowAnswers(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d jsonDashboard) {
		if !strings.HasSuffix(d.Description, "?") {
			t.Errorf("description %q is no question", d.Description)
		}
		rows := 0
		for _, p := range d.Panels {
			if p.Type == "row" {
				rows++
			}
			if rows == 1 && p.Type != "row" && p.Type != "stat" || p.Type == "row" && rows == 1 &&
				!strings.HasSuffix(p.Title, "?") {
				t.Errorf("%s, a %s, stands at the top", p.Title, p.Type)
			}
		}
	})
}

var (
	rateCall  = regexp.MustCompile(`\b(?:rate|irate|increase|[a-z]+_over_time)\(`)
	rangeText = regexp.MustCompile(`\}\[([^\]]+)\]`)
	selectors = regexp.MustCompile(`\{[^}]*\}`)
)

func checkTargets(t *testing.T, p jsonPanel) {
	t.Helper()
	refs := map[string]bool{}
	for _, q := range p.Targets {
		if refs[q.RefID] || q.RefID == "" {
			t.Errorf("%s: query id %q is empty or repeated", p.Title, q.RefID)
		}
		refs[q.RefID] = true
		if q.Datasource != templated {
			t.Errorf("%s: data source %+v is not the chosen one", p.Title, q.Datasource)
		}
		for _, fault := range check(q.Expr) {
			t.Errorf("%s: %s: %s", p.Title, q.Expr, fault)
		}
		for _, r := range rangeText.FindAllStringSubmatch(q.Expr, -1) {
			if r[1] != "$__rate_interval" && r[1] != "$__range" {
				t.Errorf("%s: [%s] does not follow the zoom and the scrape interval", p.Title, r[1])
			}
		}
		if n := len(rateCall.FindAllString(q.Expr, -1)); n != len(rangeText.FindAllString(q.Expr, -1)) {
			t.Errorf("%s: %d rates, but another number of ranges: %s", p.Title, n, q.Expr)
		}
		if strings.Contains(q.Expr, "(ALERTS{") {
			continue // an alert may be about no instance at all
		}
		for _, s := range selectors.FindAllString(q.Expr, -1) {
			if !strings.Contains(s, `job=~"$job"`) || !strings.Contains(s, `instance=~"$instance"`) {
				t.Errorf("%s: %s does not select by job and instance", p.Title, s)
			}
		}
		if !selectors.MatchString(q.Expr) {
			t.Errorf("%s: %s selects nothing by job and instance", p.Title, q.Expr)
		}
	}
}

// TestDashboardGrid checks that every panel is inside the 24 columns and that no panels overlap.
func TestDashboardGrid(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d jsonDashboard) {
		taken := map[[2]int]string{}
		for _, p := range d.Panels {
			g := p.GridPos
			if g.X < 0 || g.Y < 0 || g.W < 1 || g.H < 1 || g.X+g.W > 24 {
				t.Errorf("%s is outside of the grid: %+v", p.Title, g)
			}
			for x := g.X; x < g.X+g.W; x++ {
				for y := g.Y; y < g.Y+g.H; y++ {
					if other, ok := taken[[2]int{x, y}]; ok {
						t.Fatalf("%s covers %s at column %d, line %d", p.Title, other, x, y)
					}
					taken[[2]int{x, y}] = p.Title
				}
			}
		}
	})
}

// must ends the test if err is not nil.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
