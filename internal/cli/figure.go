package cli

import (
	"fmt"
	"math"
	"slices"

	"github.com/dustin/go-humanize"
)

// Figure is one number, with its value in every repetition of a measurement.
type Figure struct {
	Median float64   `json:"median"`
	Min    float64   `json:"min"`
	Max    float64   `json:"max"`
	Runs   []float64 `json:"runs"`
}

// Add adds one repetition's number.
func (f *Figure) Add(v float64) {
	f.Runs = append(f.Runs, v)
	s := slices.Sorted(slices.Values(f.Runs))
	f.Min, f.Max = s[0], s[len(s)-1]
	f.Median = (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// Text shows the median with so many digits and, of several repetitions, the least and the most.
func (f *Figure) Text(digits int) string {
	num := func(v float64) string { // CommafWithDigits does not round
		return humanize.CommafWithDigits(math.Round(v*math.Pow10(digits))/math.Pow10(digits), digits)
	}
	if len(f.Runs) == 1 {
		return num(f.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", num(f.Median), num(f.Min), num(f.Max))
}
