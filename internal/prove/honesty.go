package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"posthaste/internal/pause"
)

const (
	// lookEvery is how often readiness is asked for.
	lookEvery = 250 * time.Millisecond
	// verdictEvery is the same for the verdict on the whole pipeline, which costs more.
	verdictEvery = 2 * time.Second
	// greenAfter is how long events may stand still before somebody has to say so: the watchdog waits for half a
	// minute, and looks every five seconds.
	greenAfter = 40 * time.Second
	// redAfter is how long a relay may say that it is not ready when everything flows again: what it says is as old as
	// its last look.
	redAfter = 15 * time.Second
	// lieMost is how long a lie may last beyond that before it ends the campaign. All of it is counted.
	lieMost = 20 * time.Second
)

// honesty compares what the relays say of themselves with what is true.
type honesty struct {
	c *campaign

	mu sync.Mutex
	// green is how long no relay said that nothing flowed, red how long one said so while everything did.
	green, red time.Duration
	// verdict is how long a relay's verdict on the whole pipeline was not that it is broken while nothing flowed.
	verdict  time.Duration
	counting bool
	// read is how much had been read when that last changed, at moved.
	read  int
	moved time.Time
	// flows is since when everything flows, without a fault at work; zero while it does not.
	flows time.Time
	last  []readiness
}

// Lies are the seconds for which readiness was wrong, beyond what is documented.
type Lies struct {
	// Green: events stood still, and every relay that answered said that all was well.
	Green float64 `json:"green_seconds"`
	// Red: a relay said that it was not ready, and events flowed.
	Red float64 `json:"red_seconds"`
	// Verdict: events stood still, and what GET /relay, the console and posthaste status show was not "broken".
	Verdict float64 `json:"verdict_seconds"`
}

func newHonesty(c *campaign) *honesty { return &honesty{c: c} }

// begin starts the counting: before, nothing has flowed yet.
func (h *honesty) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counting = true
}

// lies returns what was counted.
func (h *honesty) lies() Lies {
	h.mu.Lock()
	defer h.mu.Unlock()
	return Lies{Green: h.green.Seconds(), Red: h.red.Seconds(), Verdict: h.verdict.Seconds()}
}

// looks returns what each relay said last.
func (h *honesty) looks() []readiness {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

// leader is the relay that said last that it leads, -1 if none did.
func (h *honesty) leader() int {
	return slices.IndexFunc(h.looks(), func(l readiness) bool { return l.Role == "leader" })
}

// run looks until ctx ends.
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
			return // nobody was asked to the end
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

// judgeVerdicts asks the relays for their verdicts, if events stand still.
func (h *honesty) judgeVerdicts(ctx context.Context, took time.Duration) {
	oldest, _ := h.c.pass.behind()
	if oldest.IsZero() || time.Since(oldest) < greenAfter || took > 3*verdictEvery {
		return
	}
	wrong := ""
	for _, p := range h.c.relays {
		var said struct{ Verdict struct{ Word string } }
		status, err := p.get(ctx, "/relay", func(body io.Reader) error { return json.NewDecoder(body).Decode(&said) })
		if err == nil && status == http.StatusOK && said.Verdict.Word != "broken" {
			wrong = fmt.Sprintf("%s says %q", p.name, said.Verdict.Word)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if wrong == "" || !h.counting {
		return
	}
	if h.verdict += took; time.Since(oldest) > greenAfter+lieMost {
		h.c.broke(&breach{
			Promise: "dishonest", At: time.Now(),
			What: fmt.Sprintf("an event waits for %v, and %s", time.Since(oldest).Round(time.Second), wrong),
		})
	}
}

// judge takes what the relays say, for the time since the last look.
func (h *honesty) judge(looks []readiness, now time.Time, took time.Duration) {
	oldest, _ := h.c.pass.behind()
	lacks := h.c.pass.lacks()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last = looks
	if n := h.c.pass.reads(); n != h.read || h.moved.IsZero() {
		h.read, h.moved = n, now
	}
	waits, stands := time.Duration(0), time.Duration(0)
	if !oldest.IsZero() {
		waits = now.Sub(oldest)
		stands = min(waits, now.Sub(h.moved)) // what flows again may be old
	}
	if waits > flowing || lacks || h.c.troubled.Load() {
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
	if !h.counting || took > 5*time.Second { // this process itself did not get to look
		return
	}
	if stands > greenAfter && answered > 0 && red == 0 {
		if h.green += took; stands > greenAfter+lieMost {
			h.c.broke(&breach{
				Promise: "dishonest", At: now,
				What: fmt.Sprintf("an event waits for %v, and every relay says that it is ready",
					stands.Round(time.Second)),
			})
		}
	}
	if red > 0 && !h.flows.IsZero() && now.Sub(h.flows) > redAfter {
		if h.red += took; now.Sub(h.flows) > redAfter+lieMost {
			h.c.broke(&breach{
				Promise: "dishonest", At: now,
				What: fmt.Sprintf("events flow, and a relay says that it is not ready: %s", why),
			})
		}
	}
}
