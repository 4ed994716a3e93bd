package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"posthaste/internal/cli"
)

// comparison has the figures of both versions and the verdicts. It is also the form of --json.
type comparison struct {
	Bench  string  `json:"bench"`
	Base   program `json:"base"`
	New    program `json:"new"`
	Rounds int     `json:"rounds"`
	// Figures are sorted: processor time and WAL first.
	Figures []*figure `json:"figures"`
}

// figure is one figure of one row, in every round.
type figure struct {
	// Of is the name of the result or limit.
	Of   string `json:"of"`
	Name string `json:"name"`
	// Limit is set for figures of the servers without a relay.
	Limit bool `json:"limit"`
	// Base and New are the medians of the rounds; null without any.
	Base *float64 `json:"base"`
	New  *float64 `json:"new"`
	// Ratio is New over Base; Least and Most are those of single rounds. They are null unless all figures are above
	// zero.
	Ratio *float64 `json:"ratio"`
	Least *float64 `json:"least"`
	Most  *float64 `json:"most"`
	// Verdict is "no difference", "N % lower", "N % higher", "N times as high", "new" (the base lacks the figure),
	// "gone", or "too few rounds". Without a ratio it is "lower" or "higher".
	Verdict string `json:"verdict"`

	place     int // of the row in the report
	base, new map[int]float64
}

// add adds the figures of one program in a round.
func (c *comparison) add(r report, round int, isNew bool) {
	for place, w := range slices.Concat(r.Results, r.Limits) {
		for name, v := range w.Figures {
			f := c.figure(w.Name, name, place >= len(r.Results))
			f.place = place
			if isNew {
				f.new[round] = v.Median
			} else {
				f.base[round] = v.Median
			}
		}
	}
}

func (c *comparison) figure(of, name string, limit bool) *figure {
	for _, f := range c.Figures {
		if f.Of == of && f.Name == name && f.Limit == limit {
			return f
		}
	}
	f := &figure{Of: of, Name: name, Limit: limit, base: map[int]float64{}, new: map[int]float64{}}
	c.Figures = append(c.Figures, f)
	return f
}

func (c *comparison) compare() {
	for _, f := range c.Figures {
		f.judge()
	}
	slices.SortStableFunc(c.Figures, func(a, b *figure) int {
		if a.Limit != b.Limit {
			if b.Limit {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(rank(a.Name), rank(b.Name)), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.place, b.place))
	})
}

// rank sorts figures that hardly depend on the machine before the others.
func rank(name string) int {
	for i, part := range []string{
		"relay_cpu_us", "cpu_us", "core_percent", "wal_bytes", "rss", "per_second", "_ms",
	} {
		if strings.Contains(name, part) {
			return i
		}
	}
	return math.MaxInt
}

const noDifference = "no difference"

// judge compares the medians, and the figures of each round.
func (f *figure) judge() {
	f.Base, f.New = median(slices.Collect(maps.Values(f.base))), median(slices.Collect(maps.Values(f.new)))
	switch {
	case f.Base == nil:
		f.Verdict = "new"
		return
	case f.New == nil:
		f.Verdict = "gone"
		return
	}
	var bases, news, ratios []float64
	for round, b := range f.base {
		if n, ok := f.new[round]; ok {
			bases, news = append(bases, b), append(news, n)
			ratios = append(ratios, n/b)
		}
	}
	switch {
	case len(ratios) < leastRounds:
		f.Verdict = "too few rounds" // below what the benchmark can measure in the others
	case slices.Min(bases) <= 0 || slices.Min(news) <= 0:
		f.Verdict = apart(bases, news)
	default:
		ratio, least, most := *f.New / *f.Base, slices.Min(ratios), slices.Max(ratios)
		f.Ratio, f.Least, f.Most = &ratio, &least, &most
		f.Verdict = verdict(ratio, least, most)
	}
}

// verdict reports a difference if every round shows it and it is larger than half the spread of the rounds. By chance
// that happens to 4 % of figures that do not differ with five rounds, to 1 % with seven.
func verdict(ratio, least, most float64) string {
	if least <= 1 && most >= 1 || math.Abs(ratio-1) <= (most-least)/2 {
		return noDifference
	}
	return change(ratio)
}

// apart judges figures without ratios, because some are not above zero: a difference if all of one version are below
// all of the other.
func apart(base, now []float64) string {
	switch {
	case slices.Max(now) < slices.Min(base):
		return "lower"
	case slices.Min(now) > slices.Max(base):
		return "higher"
	}
	return noDifference
}

// change formats a ratio in percent, or in multiples if that is shorter.
func change(ratio float64) string {
	switch {
	case ratio >= 2:
		return fmt.Sprintf("%.2g times as high", ratio)
	case ratio > 1:
		return fmt.Sprintf("%.2g %% higher", 100*(ratio-1))
	}
	return fmt.Sprintf("%.2g %% lower", 100*(1-ratio))
}

// median returns the median; nil without numbers.
func median(of []float64) *float64 {
	if len(of) == 0 {
		return nil
	}
	slices.Sort(of)
	m := (of[(len(of)-1)/2] + of[len(of)/2]) / 2
	return &m
}

// print shows results, then limits, which differ only if the machine or the tables do.
func (c *comparison) print(out io.Writer) error {
	fmt.Fprintf(out, "%s: base %s, new %s; medians of %d rounds\n", c.Bench, c.Base.Version, c.New.Version, c.Rounds)
	fmt.Fprintln(out, "ratio is new over base (least–most of single rounds)")
	for _, limits := range []bool{false, true} {
		title := "result"
		if limits {
			title = "limit"
		}
		t := cli.Table(out)
		fmt.Fprintf(t, "\n%s\tfigure\tbase\tnew\tratio\tverdict\n", title)
		for _, f := range c.Figures {
			if f.Limit == limits {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", f.Of, f.Name, number(f.Base), number(f.New), f.ratios(),
					f.Verdict)
			}
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func (f *figure) ratios() string {
	if f.Ratio == nil {
		return "–"
	}
	return fmt.Sprintf("%.3f (%.3f–%.3f)", *f.Ratio, *f.Least, *f.Most)
}

// number formats a figure with its significant digits.
func number(v *float64) string {
	switch {
	case v == nil:
		return "–"
	case math.Abs(*v) >= 100:
		return fmt.Sprintf("%.0f", *v)
	}
	return fmt.Sprintf("%.3g", *v)
}
