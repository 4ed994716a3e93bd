package bench

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// A benchmark's longest line fits into 80 columns.
func TestProgressFitsTheTerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := &progress{
		w: &out, tty: true, steps: 12, at: 12, name: "limits in Postgres", total: 300_000,
		began: time.Now().Add(-time.Hour), since: time.Now().Add(-10 * time.Second),
	}
	p.count.Store(200_000)
	if p.line("", ""); out.Len() >= 80 || !strings.HasSuffix(out.String(), " left") {
		t.Errorf("%d columns: %q", out.Len(), out.String())
	}
}
