package grafana

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

type source struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type target struct {
	RefID      string `json:"refId"`
	Datasource source `json:"datasource"`
	Expr       string `json:"expr"`
}

type panel struct {
	ID          int                      `json:"id"`
	Type        string                   `json:"type"`
	Title       string                   `json:"title"`
	Description string                   `json:"description"`
	Datasource  source                   `json:"datasource"`
	GridPos     struct{ X, Y, W, H int } `json:"gridPos"`
	Targets     []target                 `json:"targets"`
	Panels      []panel                  `json:"panels"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

type variable struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Query      json.RawMessage `json:"query"`
	Refresh    int             `json:"refresh"`
	Datasource source          `json:"datasource"`
	Current    struct {
		Value any `json:"value"`
	} `json:"current"`
}

type dashboard struct {
	UID           string  `json:"uid"`
	Title         string  `json:"title"`
	Description   string  `json:"description"`
	Editable      *bool   `json:"editable"`
	SchemaVersion int     `json:"schemaVersion"`
	Panels        []panel `json:"panels"`
	Annotations   struct {
		List []struct {
			Datasource source `json:"datasource"`
			Expr       string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
	Templating struct {
		List []variable `json:"list"`
	} `json:"templating"`
}

// templated is the data source that the reader chose.
var templated = source{Type: "prometheus", UID: "${datasource}"}

// each runs f as a test of every dashboard.
func each(t *testing.T, f func(t *testing.T, d dashboard)) {
	t.Helper()
	files, err := filepath.Glob("dashboards/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no dashboards: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var d dashboard
			if err := json.Unmarshal(b, &d); err != nil {
				t.Fatal(err)
			}
			f(t, d)
		})
	}
}

func TestDashboardHead(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d dashboard) {
		if d.UID == "" || d.Title == "" || d.Description == "" || d.SchemaVersion == 0 {
			t.Errorf("uid %q, title %q, description %q, schema %d: none may be empty", d.UID, d.Title, d.Description, d.SchemaVersion)
		}
		if d.Editable == nil || *d.Editable {
			t.Error("editable: the files are the source, so a change in the browser would be lost")
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
	each(t, func(t *testing.T, d dashboard) {
		var names []string
		for _, v := range d.Templating.List {
			names = append(names, v.Name)
			switch v.Type {
			case "datasource":
				if string(v.Query) != `"prometheus"` || v.Current.Value != uid {
					t.Errorf("%s: of type %s, at first %v; want Prometheus, and %s", v.Name, v.Query, v.Current.Value, uid)
				}
			case "query":
				if v.Datasource != templated || v.Refresh != 2 {
					t.Errorf("%s: data source %+v, refresh %d; want the chosen one, and 2 (when the time range changes)", v.Name, v.Datasource, v.Refresh)
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
	if err != nil {
		t.Fatal(err)
	}
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
	each(t, func(t *testing.T, d dashboard) {
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
				if len(p.Panels) > 0 {
					t.Errorf("%s: panels inside a row are not checked here", p.Title)
				}
				continue
			}
			if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 {
				t.Errorf("%s: description %q, unit %q, %d queries: none may be empty", p.Title, p.Description, p.FieldConfig.Defaults.Unit, len(p.Targets))
			}
			if p.Datasource != templated {
				t.Errorf("%s: data source %+v is not the chosen one", p.Title, p.Datasource)
			}
			checkTargets(t, p)
		}
	})
}

var (
	rateCall  = regexp.MustCompile(`\b(?:rate|irate|increase)\(`)
	rangeText = regexp.MustCompile(`\[([^\]]+)\]`)
	selectors = regexp.MustCompile(`\{[^}]*\}`)
)

func checkTargets(t *testing.T, p panel) {
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

// TestDashboardGrid: every panel is inside the 24 columns, and none covers another.
func TestDashboardGrid(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d dashboard) {
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
