package prove

import (
	"io"
	"sync/atomic"
	"time"

	"posthaste/internal/cli"
)

// progress reports the campaign's progress on standard error.
type progress struct {
	*cli.Status
	total time.Duration
	// until is when the faults end; nil before they begin.
	until atomic.Pointer[time.Time]
}

func newProgress(w io.Writer, total time.Duration) *progress {
	return &progress{Status: cli.NewStatus(w), total: total}
}

// left returns the remaining time.
func (p *progress) left() string {
	until := p.until.Load()
	if until == nil {
		return p.total.String() + " to come"
	}
	if d := time.Until(*until); d > 0 {
		return d.Round(time.Second).String() + " left"
	}
	return "ending"
}
