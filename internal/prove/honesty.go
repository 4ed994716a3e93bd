package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
)

const (
	// lookEvery is the interval between requests for readiness.
	lookEvery = 250 * time.Millisecond
	// verdictEvery is the interval between requests for the verdict on the whole pipeline, which cost more.
	verdictEvery = 2 * time.Second
	// greenAfter is how long events may be blocked before a relay must report it: the watchdog waits 30 seconds and
	// checks every five seconds.
	greenAfter = 40 * time.Second
	// redAfter is how long a relay may report that it is not ready after events flow again: its report is as old as its
	// last check.
	redAfter = 15 * time.Second
	// lieMost is how long a wrong report may last beyond these limits before it ends the campaign. Lies counts every
	// second of it.
	lieMost = 20 * time.Second
)

// honesty compares the relays' reports about themselves with the truth.
type honesty struct {
	c *campaign

	mu       sync.Mutex
	lies     Lies
	counting bool
	// read is the number of entries read at moved, when it last changed.
	read  int
	moved time.Time
	// flows is the time since which all events flow with no fault active; zero while they do not.
	flows time.Time
	last  []readiness
}

// Lies are the seconds in which the relays' reports were wrong for longer than documented.
type Lies struct {
	// Green: events were blocked, and every relay that answered reported that it was ready.
	Green float64 `json:"green_seconds"`
	// Red: a relay reported that it was not ready, and events flowed.
	Red float64 `json:"red_seconds"`
	// Verdict: events were blocked, and GET /relay, the console and posthaste status did not show "broken".
	Verdict float64 `json:"verdict_seconds"`
}

// begin starts the counting. It is called after the first events have flowed.
func (h *honesty) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counting = true
}

// counted returns the lies so far.
func (h *honesty) counted() Lies {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lies
}

// looks returns the last report of each relay.
func (h *honesty) looks() []readiness {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// leader returns the index of the relay whose last report claims to lead, or -1.
func (h *honesty) leader() int {
	return slices.IndexFunc(h.looks(), func(l readiness) bool { return l.Role == "leader" })
}

// run checks the relays until ctx ends.
func (h *honesty) run(ctx context.Context) {
	before := time.Now()
	asked := before
	for pause.For(ctx, lookEvery) == nil {
		looks := make([]readiness, len(h.c.relays))
		var all sync.WaitGroup
		for i, p := range h.c.relays {
			all.Go(func() { looks[i] = p.ready(ctx) })
		}
		all.Wait()
		if ctx.Err() != nil {
			return // ctx cut the requests short
		}
		now := time.Now()
		h.judge(looks, now, now.Sub(before))
		before = now
		if now.Sub(asked) > verdictEvery {
			h.judgeVerdicts(ctx, time.Since(asked))
			asked = now
		}
	}
}

// judgeVerdicts requests the relays' verdicts if events are blocked.
func (h *honesty) judgeVerdicts(ctx context.Context, took time.Duration) {
	oldest, _ := h.c.pass.Behind()
	if oldest.IsZero() || time.Since(oldest) < greenAfter || took > 3*verdictEvery {
		return
	}
	wrong := ""
	for _, p := range h.c.relays {
		var said struct{ Verdict struct{ Word string } }
		a, err := p.get(ctx, "/relay")
		if err == nil && a.Status == http.StatusOK && json.Unmarshal(a.Body, &said) == nil &&
			said.Verdict.Word != "broken" {
			wrong = fmt.Sprintf("%s says %q", p.name, said.Verdict.Word)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if waits := time.Since(oldest); wrong != "" && h.counting {
		h.wrong(&h.lies.Verdict, took, waits-greenAfter, "an event waits for %v, and %s", waits.Round(time.Second),
			wrong)
	}
}

// wrong adds took to a count of wrong reports. If the report has been wrong for too long, a promise is broken. The
// caller holds mu.
func (h *honesty) wrong(count *float64, took, since time.Duration, format string, args ...any) {
	if *count += took.Seconds(); since > lieMost {
		h.c.breaks("dishonest", uuid.Nil, "", format, args...)
	}
}

// judge evaluates the relays' reports. It adds took, the time since the last check, to the counts of wrong ones.
func (h *honesty) judge(looks []readiness, now time.Time, took time.Duration) {
	oldest, _ := h.c.pass.Behind()
	_, read, gone := h.c.pass.Counts()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = looks
	if read != h.read || h.moved.IsZero() {
		h.read, h.moved = read, now
	}
	waits, stands := time.Duration(0), time.Duration(0)
	if !oldest.IsZero() {
		waits = now.Sub(oldest)
		stands = min(waits, now.Sub(h.moved)) // an event may be old and flow again
	}
	if waits > flowing || gone > 0 || h.c.troubled.Load() {
		h.flows = time.Time{}
	} else if h.flows.IsZero() {
		h.flows = now
	}
	answered, red, why := 0, 0, ""
	for i, l := range looks {
		if l.Status != 0 {
			answered++
		}
		if l.Status == 503 {
			red++
			why = fmt.Sprintf("%s: %s", h.c.relays[i].name, strings.Join(l.Reasons, "; "))
		}
	}
	if !h.counting || took > 5*time.Second { // this process itself was delayed
		return
	}
	if stands > greenAfter && answered > 0 && red == 0 {
		h.wrong(&h.lies.Green, took, stands-greenAfter, "an event waits for %v, and every relay says that it is ready",
			stands.Round(time.Second))
	}
	if red > 0 && !h.flows.IsZero() && now.Sub(h.flows) > redAfter {
		h.wrong(&h.lies.Red, took, now.Sub(h.flows)-redAfter, "events flow, and a relay says that it is not ready: %s",
			why)
	}
}
