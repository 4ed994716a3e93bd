package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"posthaste/internal/cli"
)

// sweep has the latencies of both versions by rate. It is also the form of --json.
type sweep struct {
	Base program `json:"base"`
	New  program `json:"new"`
	At   []at    `json:"at"`
}

// at has the latencies at one rate: medians of the rounds, in milliseconds.
type at struct {
	Rate float64 `json:"rate"`
	Base pace    `json:"base"`
	New  pace    `json:"new"`
}

type pace struct {
	P50 float64 `json:"p50_ms"`
	P99 float64 `json:"p99_ms"`
}

// measureRates measures the latency of both at each rate in a run of its own: older commits accept only one rate.
func measureRates(ctx context.Context, p pair, rates []float64, bench []string, rounds int, stderr io.Writer,
) (*sweep, error) {
	w := &sweep{Base: p.base, New: p.tree}
	for _, rate := range rates {
		fmt.Fprintf(stderr, "%g per second\n", rate)
		args := slices.Concat([]string{"latency", "--mode=cdc", fmt.Sprintf("--rate=%g", rate)}, bench)
		c, err := measure(ctx, p, args, rounds, stderr)
		if err != nil {
			return nil, err
		}
		c.compare()
		x := at{Rate: rate}
		for name, v := range map[string][2]*float64{
			"p50_ms": {&x.Base.P50, &x.New.P50}, "p99_ms": {&x.Base.P99, &x.New.P99},
		} {
			f := c.figure("cdc", name, false)
			if f.Base == nil || f.New == nil {
				return nil, fmt.Errorf("there is no %s of both at %g per second", name, rate)
			}
			*v[0], *v[1] = *f.Base, *f.New
		}
		w.At = append(w.At, x)
	}
	return w, nil
}

func (w *sweep) print(out io.Writer) error {
	t := cli.Table(out)
	fmt.Fprintf(t, "per second\tp50 ms, %s\tp99 ms\tp50 ms, %s\tp99 ms\n", w.Base.Version, w.New.Version)
	for _, x := range w.At {
		fmt.Fprintf(t, "%g\t%.1f\t%.1f\t%.1f\t%.1f\n", x.Rate, x.Base.P50, x.Base.P99, x.New.P50, x.New.P99)
	}
	return t.Flush()
}

func (w *sweep) write(name string) error {
	return os.WriteFile(name, []byte(w.svg()), 0o644) //nolint:gosec // a page shows it
}

// Positions of the axes, in pixels.
const (
	width, height            = 760, 430
	left, right, top, bottom = 62.0, 620.0, 56.0, 368.0
)

// frame is the picture without curves. Its background is light or dark, as the reader's system is.
const frame = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d">
<title>Latency against rate, before and now</title>
<style>
text { font: 13px system-ui, sans-serif; fill: #59636e }
.paper { fill: #ffffff } .head { font-weight: 600; font-size: 15px; fill: #1f2328 } .grid { stroke: #d1d9e0 }
.base { stroke: #bc4c00; fill: #bc4c00 } .new { stroke: #0969da; fill: #0969da }
path { fill: none !important; stroke-width: 2 } .p99 { stroke-dasharray: 6 4 } text.base, text.new { stroke: none }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1 } .paper { fill: #0d1117 } .head { fill: #f0f6fc } .grid { stroke: #3d444d }
.base { stroke: #f0883e; fill: #f0883e } .new { stroke: #58a6ff; fill: #58a6ff }
}
</style>
<rect class="paper" width="%[1]d" height="%[2]d" rx="6"/>
<text class="head" x="%[3]g" y="26">From the insert to its consumer, in milliseconds</text>
<text x="%[4]g" y="%[5]g" text-anchor="middle">transactions of one event per second</text>
`

type curve struct {
	class, label string
	of           func(at) float64
}

// svg draws logarithmic axes, and a label at the end of each curve.
func (w *sweep) svg() string {
	curves := []curve{
		{"base p50", "before, p50", func(x at) float64 { return x.Base.P50 }},
		{"base p99", "before, p99", func(x at) float64 { return x.Base.P99 }},
		{"new p50", "now, p50", func(x at) float64 { return x.New.P50 }},
		{"new p99", "now, p99", func(x at) float64 { return x.New.P99 }},
	}
	var rates, times []float64
	for _, x := range w.At {
		rates = append(rates, x.Rate)
		for _, c := range curves {
			times = append(times, c.of(x))
		}
	}
	fromX, toX := span(rates)
	fromY, toY := span(times)
	posX := func(v float64) float64 { return place(v, fromX, toX, left, right) }
	posY := func(v float64) float64 { return place(v, fromY, toY, bottom, top) }

	var b strings.Builder
	fmt.Fprintf(&b, frame, width, height, left, (left+right)/2, bottom+44)
	for _, v := range ticks(fromX, toX) {
		fmt.Fprintf(&b, `<line class="grid" x1="%.1f" y1="%g" x2="%[1]f" y2="%[3]g"/>`+
			`<text x="%[1]f" y="%[4]g" text-anchor="middle">%[5]g</text>`+"\n", posX(v), top, bottom, bottom+20, v)
	}
	for _, v := range ticks(fromY, toY) {
		fmt.Fprintf(&b, `<line class="grid" x1="%g" y1="%.1f" x2="%g" y2="%[2]f"/>`+
			`<text x="%[4]g" y="%[5]f" text-anchor="end">%[6]g</text>`+"\n", left, posY(v), right, left-8, posY(v)+4, v)
	}
	ends := make([]float64, len(curves))
	for i, c := range curves {
		var path []string
		for _, x := range w.At {
			px, py := posX(x.Rate), posY(c.of(x))
			path = append(path, fmt.Sprintf("%.1f,%.1f", px, py))
			fmt.Fprintf(&b, `<circle class="%s" cx="%.1f" cy="%.1f" r="3"/>`, strings.Fields(c.class)[0], px, py)
			ends[i] = py
		}
		fmt.Fprintf(&b, "\n"+`<path class="%s" d="M%s"/>`+"\n", c.class, strings.Join(path, " L"))
	}
	for i, y := range apartBy(ends, 17) {
		fmt.Fprintf(&b, `<text class="%s" x="%g" y="%.1f">%s</text>`+"\n", strings.Fields(curves[i].class)[0], right+12,
			y+4, curves[i].label)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// steps are the ticks of a decade.
var steps = []float64{1, 2, 5}

// span returns the least and the greatest number, rounded outwards to ticks.
func span(of []float64) (from, to float64) {
	least, most := max(slices.Min(of), 1e-3), max(slices.Max(of), 1e-3)
	all := ticks(least/10, most*10)
	from, to = all[0], all[len(all)-1]
	for _, v := range all {
		if v <= least {
			from = v
		}
		if v >= most {
			return from, v
		}
	}
	return from, to
}

// ticks returns the steps of every decade within the range.
func ticks(from, to float64) (list []float64) {
	for d := math.Floor(math.Log10(from)); d <= math.Log10(to); d++ {
		for _, s := range steps {
			if v := s * math.Pow(10, d); v >= from*0.999 && v <= to*1.001 {
				list = append(list, v)
			}
		}
	}
	return list
}

// place returns the position of a number on a logarithmic axis.
func place(v, from, to, first, last float64) float64 {
	if to <= from {
		return first
	}
	return first + (last-first)*math.Log(max(v, from)/from)/math.Log(to/from)
}

// apartBy moves labels down until they are least apart, and up again if they are below the axis.
func apartBy(ys []float64, least float64) []float64 {
	order := make([]int, len(ys))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(ys[a], ys[b]) })
	moved := slices.Clone(ys)
	for n := 1; n < len(order); n++ {
		moved[order[n]] = max(moved[order[n]], moved[order[n-1]]+least)
	}
	limit := bottom
	for _, i := range slices.Backward(order) {
		moved[i] = min(moved[i], limit)
		limit = moved[i] - least
	}
	return moved
}
