package bench

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
)

// report is the result of a benchmark: limits, which are the figures of a server alone, and results, to be compared
// with them. It is also the form of --json.
type report struct {
	Bench    string         `json:"bench"`
	At       time.Time      `json:"at"`
	Machine  machine        `json:"machine"`
	Settings map[string]any `json:"settings"`
	Limits   []*row         `json:"limits"`
	Results  []*row         `json:"results"`

	notes string // explains the figures
}

// row is one measurement with all its repetitions.
type row struct {
	Name string `json:"name"`
	What string `json:"what"`
	// Figures by name; the name ends in the unit.
	Figures map[string]*cli.Figure `json:"figures"`
	// Ratios are Figures over a limit's, by the limit's name.
	Ratios map[string]float64 `json:"ratios,omitempty"`
	Bound  string             `json:"bound,omitempty"`
	Check  *check             `json:"check,omitempty"`
}

// columns are the figures shown in tables, if they were measured: their heads, and the digits after the point.
var columns = []struct {
	name, head string
	digits     int
}{
	{"per_second", "per second", 0},
	{"p50_ms", "p50 ms", 2},
	{"p90_ms", "p90 ms", 2},
	{"p99_ms", "p99 ms", 2},
	{"p999_ms", "p99.9 ms", 2},
	{"max_ms", "max ms", 2},
	{"arrived_per_second", "arrived/s", 0},
	{"published_per_second", "published/s", 0},
	{"settled_per_second", "settled/s", 0},
	{"payload_mib_per_second", "MiB/s", 1},
	{"of_none_percent", "% of none", 0},
	{"behind_ms", "behind ms", 0},
	{"missing", "missing", 0},
	{"tax_us", "tax µs", 1},
	{"client_cpu_us", "client µs", 1},
	{"relay_cpu_us", "relay µs", 1},
	{"postgres_cpu_us", "postgres µs", 1},
	{"redis_cpu_us", "redis µs", 1},
	{"nats_cpu_us", "nats µs", 1},
	{"wal_bytes", "WAL bytes", 0},
	{"settle_wal_bytes", "settling WAL", 1},
	{"redis_bytes", "redis bytes", 0},
	{"nats_bytes", "nats bytes", 0},
	{"kept_wal_mib", "kept WAL MiB", 0},
	{"backlog_rows", "backlog", 0},
	{"relay_peak_rss_mib", "peak RSS MiB", 0},
	{"busy_percent", "busy %", 0},
	{"relay_core_percent", "relay % of a core", 2},
	{"postgres_core_percent", "postgres %", 2},
	{"redis_core_percent", "redis %", 2},
	{"wal_bytes_per_second", "WAL bytes/s", 0},
	{"relay_rss_mib", "relay RSS MiB", 0},
}

// check is the count after the measurement, over all repetitions.
type check struct {
	// Committed is how many events or orders were written, Found how many of them are in their place.
	Committed int `json:"committed"`
	Found     int `json:"found"`
	Lost      int `json:"lost"`
	Repeated  int `json:"repeated"`
	// Unknown were never committed.
	Unknown int `json:"unknown"`
	// Recorded is how many events of the log are settled or, for orders, how many events there are.
	Recorded int `json:"recorded"`
	// Replayed counts requests that were answered with an earlier order.
	Replayed int `json:"replayed,omitempty"`
}

func (c *check) add(o check) {
	c.Committed += o.Committed
	c.Found += o.Found
	c.Lost += o.Lost
	c.Repeated += o.Repeated
	c.Unknown += o.Unknown
	c.Recorded += o.Recorded
	c.Replayed += o.Replayed
}

// holds reports whether everything committed was found exactly once.
func (c *check) holds() bool {
	return c.Lost == 0 && c.Repeated == 0 && c.Unknown == 0 && c.Found == c.Committed && c.Recorded == c.Committed
}

// entry returns the row with a name in list, and adds it if it is missing.
func entry(list *[]*row, name, what string) *row {
	for _, r := range *list {
		if r.Name == name {
			return r
		}
	}
	r := &row{Name: name, What: what, Figures: map[string]*cli.Figure{}, Ratios: map[string]float64{}}
	*list = append(*list, r)
	return r
}

func (r *report) limit(name, what string) *row  { return entry(&r.Limits, name, what) }
func (r *report) result(name, what string) *row { return entry(&r.Results, name, what) }

// is adds one repetition's number.
func (r *row) is(name string, v float64) {
	if r.Figures[name] == nil {
		r.Figures[name] = &cli.Figure{}
	}
	r.Figures[name].Add(v)
}

// median returns a figure's median; 0 if it was not measured.
func (r *row) median(name string) float64 {
	if f := r.Figures[name]; f != nil {
		return f.Median
	}
	return 0
}

// last returns a figure of the current repetition; 0 if it was not measured.
func (r *row) last(name string) float64 {
	if f := r.Figures[name]; f != nil {
		return f.Runs[len(f.Runs)-1]
	}
	return 0
}

// checked adds the counts of a repetition.
func (r *row) checked(c check) {
	if r.Check == nil {
		r.Check = &check{}
	}
	r.Check.add(c)
}

func (r *row) spread(took []time.Duration) {
	s := slices.Sorted(slices.Values(took))
	for _, q := range []struct {
		name string
		of   float64
	}{{"p50_ms", 0.5}, {"p90_ms", 0.9}, {"p99_ms", 0.99}, {"p999_ms", 0.999}, {"max_ms", 1}} {
		if len(s) > 0 {
			r.is(q.name, millis(s[max(0, int(q.of*float64(len(s))+0.5)-1)]))
		}
	}
}

func (r *report) find(name string) *row {
	return r.Limits[slices.IndexFunc(r.Limits, func(l *row) bool { return l.Name == name })]
}

// together is the ratio to the limits in sequence, which is the relevant one if they share processors.
const together = "all of these one after the other"

// against records a result's rate as a share of the limits' rates, and returns the lowest limit.
func (r *report) against(w *row, rate string, limits ...string) (lowest string) {
	least, sum := math.Inf(1), 0.0
	for _, name := range limits {
		v := r.find(name).median("per_second")
		w.Ratios[name] = w.median(rate) / v
		sum += 1 / v
		if v < least {
			lowest, least = name, v
		}
	}
	w.Ratios[together] = w.median(rate) * sum
	return lowest
}

// ErrFound means that the result is wrong: not everything written was found exactly once.
var ErrFound = errors.New("the measurement is invalid: events or orders are missing, repeated or refused; please " +
	"report this with the relay's log")

// finish prints the report, and returns ErrFound if its checks do not hold.
func (r *report) finish(o cli.IO, asJSON bool) error {
	var err error
	if asJSON {
		err = o.JSON(r)
	} else {
		err = r.print(o.Stdout)
	}
	if err != nil {
		return err
	}
	for _, w := range r.Results {
		if w.Check != nil && !w.Check.holds() {
			return ErrFound
		}
	}
	return nil
}

func (r *report) print(out io.Writer) error {
	fmt.Fprint(out, r.Machine.text())
	var set []string
	for k, v := range r.Settings {
		set = append(set, fmt.Sprintf("%s %v", strings.ReplaceAll(k, "_", " "), v))
	}
	slices.Sort(set)
	fmt.Fprintf(out, "settings: %s\nmedian (least–most) of the runs; µs is processor time per event or request, "+
		"busy %% the whole machine%s\n\n", strings.Join(set, ", "), r.notes)
	t := cli.Table(out)
	if len(r.Limits) > 0 {
		table(t, "limit", r.Limits)
		fmt.Fprintln(t)
	}
	table(t, "result", r.Results)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	said := map[string]bool{} // descriptions that several rows share are printed once
	for _, w := range r.Results {
		if !said[w.What] {
			fmt.Fprintf(out, "%s: %s\n", w.Name, w.What)
		} else if w.Check != nil {
			fmt.Fprintln(out, w.Name)
		}
		said[w.What] = true
		var parts []string
		for _, name := range slices.SortedFunc(maps.Keys(w.Ratios),
			func(a, b string) int { return cmp.Compare(w.Ratios[b], w.Ratios[a]) }) {
			parts = append(parts, fmt.Sprintf("%s %s", ratioText(w.Ratios[name]), name))
		}
		if len(parts) > 0 {
			fmt.Fprintf(out, "  is %s\n", strings.Join(parts, ", "))
		}
		if w.Bound != "" {
			fmt.Fprintf(out, "  bound by %s\n", w.Bound)
		}
		if c := w.Check; c != nil {
			fmt.Fprintf(out, "  counted: %s committed, %s found, lost %d, repeated %d",
				humanize.Comma(int64(c.Committed)), humanize.Comma(int64(c.Found)), c.Lost, c.Repeated)
			if c.Replayed > 0 {
				fmt.Fprintf(out, "; %s more answered from an earlier one", humanize.Comma(int64(c.Replayed)))
			}
			fmt.Fprintln(out)
		}
	}
	for _, l := range r.Limits {
		if !said[l.What] {
			fmt.Fprintf(out, "%s: %s\n", l.Name, l.What)
		}
		said[l.What] = true
	}
	return nil
}

// ratioText formats a ratio with two digits.
func ratioText(v float64) string {
	if v >= 10 {
		return fmt.Sprintf("%.0f ×", v)
	}
	return fmt.Sprintf("%.2g ×", v)
}

func table(t io.Writer, what string, rows []*row) {
	shown := columns[:0:0]
	fmt.Fprint(t, what)
	for _, c := range columns {
		if slices.ContainsFunc(rows, func(w *row) bool { return w.Figures[c.name] != nil }) {
			shown = append(shown, c)
			fmt.Fprintf(t, "\t%s", c.head)
		}
	}
	fmt.Fprintln(t)
	for _, w := range rows {
		fmt.Fprint(t, w.Name)
		for _, c := range shown {
			f := w.Figures[c.name]
			if f == nil {
				fmt.Fprint(t, "\t–")
				continue
			}
			fmt.Fprintf(t, "\t%s", f.Text(c.digits))
		}
		fmt.Fprintln(t)
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// machine describes the machine and its servers. Durability is part of it: without fsync a commit costs nothing.
type machine struct {
	Cores      int               `json:"cores"`
	Platform   string            `json:"platform"`
	Load       float64           `json:"load_average_before"`
	Servers    string            `json:"servers"`
	Versions   map[string]string `json:"versions"`
	Durability map[string]string `json:"durability"`
}

func (m machine) text() string {
	servers := []string{"posthaste", "go", "postgres", "redis"}
	if m.Versions["nats"] != "" {
		servers = append(servers, "nats")
	}
	return fmt.Sprintf("machine: %d cores, %s, load average %.1f before the run; servers: %s\nversions: "+
		"%s\ndurability: %s\n", m.Cores, m.Platform, m.Load, m.Servers, pairs(m.Versions, servers...),
		pairs(m.Durability, "fsync", "synchronous_commit", "full_page_writes", "appendonly", "appendfsync",
			"redis_durability"))
}

// pairs lists some values of m with their keys.
func pairs(m map[string]string, keys ...string) string {
	list := make([]string, len(keys))
	for i, k := range keys {
		list[i] = k + " " + m[k]
	}
	return strings.Join(list, ", ")
}
