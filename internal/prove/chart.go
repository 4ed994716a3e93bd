package prove

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strings"

	"posthaste/outbox"
)

// The chart's measures.
const (
	chartWidth, chartHeight = 1000, 420
	chartLeft, chartRight   = 70, 20
	rateTop, rateHeight     = 30, 120
	lagTop, lagHeight       = 190, 120
	modeTop, faultTop       = 335, 360
	barHeight               = 14
)

// chart draws the campaign: rates, waiting events, the mode and the faults.
func (r *Report) chart() string {
	end := 1.0
	if n := len(r.Samples); n > 0 {
		end = max(end, r.Samples[n-1].At)
	}
	d := &drawing{end: end}
	fmt.Fprintf(d, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" `+
		`font-size="11">`+"\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n", chartWidth, chartHeight)
	// Points are at least half a pixel apart.
	step := max(1, len(r.Samples)/500)
	var at, committed, seen, waiting []float64
	for i := step; i < len(r.Samples); i += step {
		a, b := r.Samples[i-step], r.Samples[i]
		took := max(b.At-a.At, 0.1)
		at = append(at, b.At)
		committed = append(committed, float64(b.Committed-a.Committed)/took)
		seen = append(seen, max(0, float64(b.Seen-a.Seen)/took))
		most := 0.0
		for _, s := range r.Samples[i-step+1 : i+1] {
			most = max(most, s.Oldest)
		}
		waiting = append(waiting, most)
	}
	top := 1.0
	if len(seen) > 0 {
		// The scale leaves out bulk loads, which would flatten everything else.
		sorted := slices.Sorted(slices.Values(seen))
		top = max(1, 1.5*sorted[len(sorted)*95/100], slices.Max(committed)/4)
	}
	d.axis(rateTop, rateHeight, top, "events/s: committed (grey), in the streams (blue)")
	d.line(rateTop, rateHeight, top, at, committed, "#999")
	d.line(rateTop, rateHeight, top, at, seen, "#1f6feb")
	lag := 1.0
	for _, w := range waiting {
		lag = max(lag, w)
	}
	d.axis(lagTop, lagHeight, lag, "seconds that the oldest event waits")
	d.line(lagTop, lagHeight, lag, at, waiting, "#cf222e")
	d.label(modeTop-5, "mode: streamed (green), swept (yellow), neither (grey)")
	from := 0
	for i := 1; i < len(r.Samples); i++ {
		if i+1 < len(r.Samples) && r.Samples[i+1].Mode == r.Samples[i].Mode {
			continue
		}
		color := map[outbox.Mode]string{outbox.ModeCDC: "#2da44e", outbox.ModePoll: "#d4a72c"}[r.Samples[i].Mode]
		if color == "" {
			color = "#bbb"
		}
		d.bar(modeTop, r.Samples[from].At, r.Samples[i].At, color, string(r.Samples[i].Mode))
		from = i
	}
	d.label(faultTop+barHeight+14, "faults, from their beginning until everything flows again")
	for _, p := range r.Rounds {
		d.bar(faultTop, p.At.Sub(r.began).Seconds(), p.Recovered.Sub(r.began).Seconds(), "#8250df", p.names())
	}
	for i := range 6 {
		t := end * float64(i) / 5
		fmt.Fprintf(d, "<text x=\"%.0f\" y=\"%d\" text-anchor=\"middle\">%.0f s</text>\n", d.x(t), chartHeight-6, t)
	}
	d.WriteString("</svg>\n")
	return d.String()
}

// drawing builds a chart.
type drawing struct {
	strings.Builder
	end float64
}

func (d *drawing) x(t float64) float64 { return chartLeft + t/d.end*(chartWidth-chartLeft-chartRight) }

func (d *drawing) label(y int, text string) {
	fmt.Fprintf(d, "<text x=\"%d\" y=\"%d\">%s</text>\n", chartLeft, y, html.EscapeString(text))
}

func (d *drawing) axis(top, height int, most float64, text string) {
	d.label(top-6, text)
	for _, part := range []float64{0, 0.5, 1} {
		y := float64(top+height) - part*float64(height)
		fmt.Fprintf(d, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"+
			"<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n", chartLeft, chartWidth-chartRight, y, y,
			chartLeft-5, y+4, math.Round(most*part))
	}
}

func (d *drawing) line(top, height int, most float64, at, values []float64, color string) {
	fmt.Fprintf(d, `<polyline fill="none" stroke="%s" points="`, color)
	for i, v := range values {
		fmt.Fprintf(d, "%.1f,%.1f ", d.x(at[i]), float64(top+height)-min(v/most, 1)*float64(height))
	}
	d.WriteString("\"/>\n")
}

func (d *drawing) bar(top int, from, to float64, color, title string) {
	fmt.Fprintf(d, "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"><title>%s</title></rect>\n",
		d.x(from), top, max(d.x(to)-d.x(from), 0.5), barHeight, color, html.EscapeString(title))
}
