package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"posthaste/internal/cli"
	"posthaste/internal/local"
)

// report is what was found; also the form of --json.
type report struct {
	At       time.Time         `json:"at"`
	Cores    int               `json:"cores"`
	Versions map[string]string `json:"versions"`
	Rounds   int               `json:"rounds"`
	Seconds  float64           `json:"seconds"`
	Size     int               `json:"payload_bytes"`
	Rows     []*row            `json:"rows"`
}

// row is a peer under a load.
type row struct {
	Load    string                 `json:"load"`
	Peer    string                 `json:"peer"`
	What    string                 `json:"what"`
	Figures map[string]*cli.Figure `json:"figures"`
}

// describe begins the report.
func (b *bench) describe(ctx context.Context) (*report, error) {
	r := &report{
		At: time.Now().UTC().Truncate(time.Second), Cores: runtime.NumCPU(), Rounds: b.rounds,
		Seconds: b.lasts.Seconds(), Size: b.size,
	}
	own, err := exec.CommandContext(ctx, b.posthaste, "version").Output()
	if err != nil {
		return nil, fmt.Errorf("%s version: %w", b.posthaste, err)
	}
	version := strings.TrimPrefix(strings.TrimSpace(string(own)), "posthaste ")
	if r.Versions, err = local.Versions(ctx, version, b.admin, b.redis); err != nil {
		return nil, err
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, m := range build.Deps {
			if name := strings.TrimPrefix(m.Path, "github.com/"); strings.HasPrefix(name, "ThreeDotsLabs/") ||
				name == "jackc/pglogrepl" {
				r.Versions[name] = m.Version
			}
		}
	}
	return r, nil
}

// add adds the figures of one round. It subtracts what Postgres uses for the inserts alone.
func (r *report) add(l load, list []peer, found map[string]figures) {
	for _, p := range list {
		f, ok := found[p.name]
		if !ok {
			continue
		}
		if p.command != nil && !l.backlog {
			none := found[list[slices.IndexFunc(list, func(n peer) bool {
				return n.command == nil && n.table == p.table
			})].name]
			arrived := max(1, f["written"]-f["missing"])
			f["postgres_us"] -= none["postgres_us"] * f["written"] / arrived
			f["of_none_percent"] = 100 * f["inserts_per_second"] / none["inserts_per_second"]
		}
		if p.command != nil {
			f["tax_us"] = f["relay_us"] + f["postgres_us"] + f["redis_us"]
		}
		delete(f, "written")
		w := r.row(l.name, p)
		for name, v := range f {
			if w.Figures[name] == nil {
				w.Figures[name] = &cli.Figure{}
			}
			w.Figures[name].Add(v)
		}
	}
}

func (r *report) row(load string, p peer) *row {
	for _, w := range r.Rows {
		if w.Load == load && w.Peer == p.name {
			return w
		}
	}
	w := &row{Load: load, Peer: p.name, What: p.what, Figures: map[string]*cli.Figure{}}
	r.Rows = append(r.Rows, w)
	return w
}

// column shows a figure.
type column struct {
	name, head string
	digits     int
}

// columns are what people are shown.
var columns = []column{
	{"events_per_second", "events/s", 0},
	{"inserts_per_second", "inserts/s", 0},
	{"of_none_percent", "% of none", 0},
	{"tax_us", "tax µs", 0},
	{"relay_us", "relay µs", 1},
	{"postgres_us", "postgres µs", 1},
	{"redis_us", "redis µs", 1},
	{"p50_ms", "p50 ms", 1},
	{"p99_ms", "p99 ms", 1},
	{"behind_ms", "behind ms", 0},
	{"missing", "missing", 0},
}

// print shows a table for each load, as Markdown.
func (r *report) print(out io.Writer) error {
	for _, name := range slices.Sorted(maps.Keys(r.Versions)) {
		fmt.Fprintf(out, "%s %s, ", name, r.Versions[name])
	}
	fmt.Fprintf(out, "%d cores\nfsync on, AOF everysec, payloads of %d bytes; %d rounds of %g s, median (least–most)\n"+
		"µs: processor time per event; of Postgres what it uses beyond the inserts (none: the inserts); the tax is "+
		"their sum\nbehind: from the last commit to the last event, for as long again as the load at most; missing: "+
		"had not arrived by then\n", r.Cores, r.Size, r.Rounds, r.Seconds)
	t := cli.Table(out)
	load := ""
	for _, w := range r.Rows {
		if w.Load != load {
			load = w.Load
			fmt.Fprintln(t)
			line(t, load, func(c column) string { return c.head })
			line(t, "---", func(column) string { return "---" })
		}
		line(t, w.Peer, func(c column) string {
			if f := w.Figures[c.name]; f != nil {
				return f.Text(c.digits)
			}
			return ""
		})
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range peers {
		fmt.Fprintf(out, "%s: %s\n", p.name, p.what)
	}
	return nil
}

// line prints a line of a table.
func line(t io.Writer, first string, cell func(c column) string) {
	fmt.Fprintf(t, "| %s\t", first)
	for _, c := range columns {
		fmt.Fprintf(t, "| %s\t", cell(c))
	}
	fmt.Fprintln(t, "|")
}
