package bench

import (
	"strings"
	"testing"
	"time"
)

// A benchmark's longest line fits into 80 columns.
func TestProgressFitsTheTerminal(t *testing.T) {
	t.Parallel()
	p := &progress{
		steps: 12, at: 12, name: "limits in Postgres", total: 300_000,
		began: time.Now().Add(-time.Hour), since: time.Now().Add(-10 * time.Second),
	}
	p.count.Store(200_000)
	if line := p.line(false); len(line) >= 80 || !strings.HasSuffix(line, " left") {
		t.Errorf("%d columns: %q", len(line), line)
	}
}
