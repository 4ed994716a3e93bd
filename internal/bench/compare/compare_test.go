package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"posthaste/internal/cli"
)

// reported is a report with one result.
func reported(t *testing.T, figures map[string]float64) report {
	t.Helper()
	var list []string
	for name, v := range figures {
		list = append(list, fmt.Sprintf(`%q: {"median": %g, "runs": [%g]}`, name, v, v))
	}
	var r report
	text := `{"results": [{"name": "r", "figures": {` + strings.Join(list, ", ") + `}}], "limits": []}`
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		base, new []float64
		ratio     float64 // 0: none
		want      string
	}{
		{"the same", []float64{5, 5, 5}, []float64{5, 5, 5}, 1, noDifference},
		{"lower in every round", []float64{10, 20, 30}, []float64{9, 18, 27}, 0.9, "10 % lower"},
		{"higher in every round", []float64{10, 20, 30}, []float64{12, 24, 36}, 1.2, "20 % higher"},
		{"much higher", []float64{1, 1, 1}, []float64{3, 3, 3}, 3, "3 times as high"},
		{"one round has it the other way round", []float64{10, 10, 10}, []float64{8, 8, 10.1}, 0.8, noDifference},
		{"one round has none", []float64{10, 10, 10}, []float64{8, 8, 10}, 0.8, noDifference},
		{"less than the rounds differ by", []float64{10, 10, 10}, []float64{10.1, 10.2, 15}, 1.02, noDifference},
		{"the median is of the medians", []float64{1, 100, 3}, []float64{2, 200, 6}, 2, "2 times as high"},
		{"nothing at all", []float64{0, 0, 0}, []float64{0, 0, 0}, 0, noDifference},
		{"below zero, and apart", []float64{-1, 0, 2}, []float64{3, 4, 5}, 0, "higher"},
		{"below zero, and not apart", []float64{-1, 0, 4}, []float64{3, 4, 5}, 0, noDifference},
		{"to nothing", []float64{3, 4, 5}, []float64{0, 0, 0}, 0, "lower"},
		{"new", nil, []float64{1, 2, 3}, 0, "new"},
		{"gone", []float64{1, 2, 3}, nil, 0, "gone"},
		{"measured twice", []float64{1, 1}, []float64{2, 2, 2}, 0, "too few rounds"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := &comparison{}
			for n, v := range tc.base {
				c.add(reported(t, map[string]float64{"x": v}), n, false)
			}
			for n, v := range tc.new {
				c.add(reported(t, map[string]float64{"x": v}), n, true)
			}
			c.compare()
			f := c.Figures[0]
			if f.Verdict != tc.want || (f.Ratio == nil) != (tc.ratio == 0) {
				t.Fatalf("verdict %q, ratio %s; want %q, %v", f.Verdict, f.ratios(), tc.want, tc.ratio)
			}
			if f.Ratio != nil && (*f.Ratio < tc.ratio-1e-9 || *f.Ratio > tc.ratio+1e-9) {
				t.Errorf("ratio %v, want %v", *f.Ratio, tc.ratio)
			}
		})
	}
}

// TestTable: figures that depend on the machine come after those that hardly do; figures that the base lacks are
// marked.
func TestTable(t *testing.T) {
	t.Parallel()
	c := &comparison{Bench: "posthaste bench drain", Base: program{Version: "a"}, New: program{Version: "b"}, Rounds: 3}
	for n := range 3 {
		c.add(reported(t, map[string]float64{"p50_ms": 1, "per_second": 1000, "relay_cpu_us": 4}), n, false)
		c.add(reported(t, map[string]float64{
			"p50_ms": 1, "per_second": 1000, "relay_cpu_us": 3, "wal_bytes": 600,
		}), n, true)
	}
	c.compare()
	var out bytes.Buffer
	if err := c.print(&out); err != nil {
		t.Fatal(err)
	}
	var order []string
	for _, f := range c.Figures {
		order = append(order, f.Name)
	}
	if want := []string{"relay_cpu_us", "wal_bytes", "per_second", "p50_ms"}; !slices.Equal(order, want) {
		t.Errorf("figures in the order %q, want %q", order, want)
	}
	for _, want := range []string{"25 % lower", "0.750 (0.750–0.750)", "–", "new", noDifference} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table has no %q:\n%s", want, out.String())
		}
	}
}

// An impossible comparison is refused before anything is built, with a remedy.
func TestRefusals(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"BASE=": nil, "ROUNDS": {"--base=HEAD", "--rounds=2"}, "rates": {"--base=HEAD", "--rates=100,0"},
		"picture": {"--base=HEAD", "--picture=x.svg", "drain"},
	} {
		o := cli.IO{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
		if err := run(t.Context(), args, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, which does not name %s", args, err, want)
		}
	}
}

func TestBuildRefusesWhatItCannotBuild(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t", "GIT_COMMITTER_NAME=t",
			"GIT_COMMITTER_EMAIL=t", "GIT_CONFIG_GLOBAL=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
	}
	git("init", "-q")
	git("commit", "-q", "--allow-empty", "-m", "nothing")
	for commit, want := range map[string]string{
		"nonsense": `no commit "nonsense"`, "--all": `no commit "--all"`, "HEAD": "does not build",
	} {
		dir := t.TempDir()
		if _, err := build(t.Context(), root, dir, commit, &bytes.Buffer{}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, which does not say %q", commit, err, want)
		}
	}
}

// TestPicture: the picture has no scripts, all four curves, and labels that do not overlap.
func TestPicture(t *testing.T) {
	t.Parallel()
	w := sweep{At: []at{
		{Rate: 100, Base: pace{0.8, 3}, New: pace{0.8, 3}},
		{Rate: 1000, Base: pace{1, 30}, New: pace{1.5, 5}},
		{Rate: 10000, Base: pace{1999, 2000}, New: pace{1990, 2000}},
	}}
	var doc struct {
		XMLName struct{} `xml:"http://www.w3.org/2000/svg svg"`
		Paths   []struct {
			D string `xml:"d,attr"`
		} `xml:"path"`
		Texts []struct {
			Y    float64 `xml:"y,attr"`
			Text string  `xml:",chardata"`
		} `xml:"text"`
		Scripts []string `xml:"script"`
	}
	if err := xml.Unmarshal([]byte(w.svg()), &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.Paths) != 4 || len(doc.Scripts) > 0 {
		t.Fatalf("%d curves, %d scripts", len(doc.Paths), len(doc.Scripts))
	}
	if d := doc.Paths[0].D; !strings.HasPrefix(d, "M62.0,") || !strings.Contains(d, " L620.0,56.") {
		t.Errorf("the first curve is %s", d)
	}
	var labels []float64
	for _, text := range doc.Texts {
		if strings.HasPrefix(text.Text, "now, ") || strings.HasPrefix(text.Text, "before, ") {
			labels = append(labels, text.Y)
		}
	}
	slices.Sort(labels)
	for n := 1; n < len(labels); n++ {
		if labels[n]-labels[n-1] < 16 {
			t.Errorf("labels are at %v", labels)
		}
	}
	if len(labels) != 4 || labels[3] > bottom+10 {
		t.Errorf("labels are at %v", labels)
	}
}
