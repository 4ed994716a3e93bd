package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
	"posthaste/internal/lab/local"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/lab/oracle"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// Report is the result of a campaign. It is the form of --json.
type Report struct {
	At          time.Time         `json:"at"`
	Seconds     float64           `json:"seconds"`
	Command     string            `json:"command"`
	Seed        uint64            `json:"seed"`
	Interrupted bool              `json:"interrupted,omitempty"`
	Holds       bool              `json:"holds"`
	Machine     Machine           `json:"machine"`
	Settings    map[string]string `json:"settings"`
	Counts      Counts            `json:"counts"`
	Lies        Lies              `json:"lies"`
	// Kinds are the faults by name, alone and in pairs.
	Kinds []*Kind `json:"faults"`
	// WALMost is the most WAL that the slot retained, in bytes.
	WALMost int64 `json:"wal_retained_most"`
	// Broken is the promise that ended the campaign; nil if all were kept. Story is everything known about it.
	Broken *oracle.Breach `json:"broken,omitempty"`
	Story  []string       `json:"story,omitempty"`
	Rounds []*round       `json:"rounds"`
	// Samples are taken once a second.
	Samples []sample `json:"samples"`

	mu    sync.Mutex
	began time.Time
}

// Machine describes the machine and the servers.
type Machine struct {
	Cores    int               `json:"cores"`
	Platform string            `json:"platform"`
	Versions map[string]string `json:"versions"`
}

// Counts are the numbers of events written and found.
type Counts struct {
	Committed int `json:"events_committed"`
	Found     int `json:"events_in_streams"`
	Lost      int `json:"lost"`
	// RolledBack events were written and rolled back. Unclear events were written, and the commit got no answer.
	RolledBack int `json:"events_rolled_back"`
	Unclear    int `json:"commits_unanswered"`
	// Forgot is how often the sink lost data; Expired is how many of the lost events were too old to be restored.
	Forgot   int `json:"times_redis_forgot"`
	Expired  int `json:"events_forgotten_beyond_restore"`
	Keys     int `json:"order_keys"`
	Orders   int `json:"orders"`
	Repeated int `json:"order_answers_repeated"`
	Effects  int `json:"effects_with_inbox"`
	// Redelivered are repeated deliveries. The inbox prevented a second effect of each.
	Redelivered int `json:"redeliveries_without_inbox"`
	Credits     int `json:"credits_moved"`
	Faults      int `json:"faults"`
	Failed      int `json:"faults_not_injected"`
}

// Kind is a fault, with the times until all events flowed again after it.
type Kind struct {
	Name    string  `json:"name"`
	About   string  `json:"about"`
	Alone   int     `json:"alone"`
	InPairs int     `json:"in_pairs"`
	Failed  int     `json:"not_injected"`
	Median  float64 `json:"recovery_median_seconds"`
	Worst   float64 `json:"recovery_worst_seconds"`
	// Waited is the longest time that an event waited, from the beginning of the fault until all events flowed.
	Waited   float64 `json:"longest_wait_seconds"`
	recovery []float64
}

// sample has the figures of one second.
type sample struct {
	At        float64     `json:"at"` // seconds since the start
	Committed int         `json:"committed"`
	Seen      int         `json:"seen"`
	Waiting   int         `json:"waiting"`
	Oldest    float64     `json:"oldest_seconds"`
	Mode      outbox.Mode `json:"mode"`
	Ready     []int       `json:"ready"`
	WAL       int64       `json:"wal_bytes"`
}

func newReport(c *campaign, began time.Time) *Report {
	o, durability, more := c.options, c.config.RedisDurability.String(), ""
	if o.Sink == sinkNats {
		more = " --sink=nats"
	}
	if durability != "none" {
		more += " --redis-durability=" + durability
	}
	return &Report{
		At: began.UTC().Truncate(time.Second), Seed: o.Seed, began: began,
		Command: fmt.Sprintf("posthaste prove --seed=%d --duration=%v --faults=%s --relays=%d --rate=%d%s", o.Seed,
			o.Duration, o.Faults, o.Relays, o.Rate, more),
		Settings: map[string]string{
			"redis_durability": durability, "restore": oracle.RestoreSpan.String(), "relays": strconv.Itoa(o.Relays),
			"rate": strconv.Itoa(o.Rate), "pubsub": fmt.Sprint(c.config.Pubsub.On()), "sink": o.Sink,
		},
	}
}

func (r *Report) machine(ctx context.Context, c *campaign) error {
	versions, err := local.Versions(ctx, c.config.Version, c.stage.pool, c.stage.client)
	r.Machine = Machine{runtime.NumCPU(), runtime.GOOS + "/" + runtime.GOARCH, versions}
	if l, is := c.stage.streams.(*natslog.Log); is && err == nil {
		versions["nats"] = l.ConnectedServerVersion()
	}
	return err
}

// played records a finished round.
func (r *Report) played(p *round) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Rounds = append(r.Rounds, p)
}

// sample takes a sample once a second, until ctx ends.
func (r *Report) sample(ctx context.Context, c *campaign) {
	for pause.For(ctx, time.Second) == nil {
		s := sample{At: time.Since(r.began).Seconds()}
		oldest, waiting := c.pass.Behind()
		c.pass.Mark(time.Now())
		s.Committed, _, _ = c.truth.Counts()
		s.Seen, _, _ = c.pass.Counts()
		s.Waiting = waiting
		if !oldest.IsZero() {
			s.Oldest = time.Since(oldest).Seconds()
		}
		for _, l := range c.honesty.looks() {
			s.Ready = append(s.Ready, l.Status)
		}
		c.ask(ctx, &s)
		r.mu.Lock()
		r.Samples = append(r.Samples, s)
		r.WALMost = max(r.WALMost, s.WAL)
		faults := len(r.Rounds)
		r.mu.Unlock()
		c.mu.Lock()
		now := c.now
		c.mu.Unlock()
		c.progress.Now("%s events, %d rounds, %d waiting, the oldest for %.1f s; %s; %s; %s",
			humanize.Comma(int64(s.Committed)), faults, s.Waiting, s.Oldest, s.Mode, now, c.left())
	}
}

// ask reads the mode and the retained WAL from Postgres, if it answers.
func (c *campaign) ask(ctx context.Context, s *sample) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if st, err := sql.ReadState(ctx, c.stage.pool, c.config.RelayName); err == nil {
		s.Mode = st.Active
		_ = c.stage.pool.QueryRow(ctx, `SELECT coalesce((SELECT pg_catalog.pg_wal_lsn_diff(pg_current_wal_lsn(),
			restart_lsn) FROM pg_replication_slots WHERE slot_name = $1), 0)::bigint`, c.config.Slot).Scan(&s.WAL)
	}
}

// finish computes the totals.
func (r *Report) finish(c *campaign, interrupted bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Seconds, r.Interrupted = time.Since(r.began).Round(time.Second).Seconds(), interrupted
	r.Lies = c.honesty.counted()
	r.Counts.Committed, r.Counts.RolledBack, r.Counts.Unclear = c.truth.Counts()
	r.Counts.Keys, r.Counts.Repeated = c.orders.counts()
	r.Broken = c.breach()
	r.Holds = r.Broken == nil
	kinds := map[string]*Kind{}
	for _, p := range r.Rounds {
		took := p.Recovered.Sub(p.Healed).Seconds()
		waited := r.waited(p)
		for _, s := range p.Faults {
			k := kinds[s.Fault]
			if k == nil {
				k = &Kind{Name: s.Fault, About: s.fault.about}
				kinds[s.Fault] = k
			}
			r.Counts.Faults++
			if s.Failed != "" {
				k.Failed++
				r.Counts.Failed++
				continue
			}
			if len(p.Faults) > 1 {
				k.InPairs++
			} else {
				k.Alone++
			}
			k.recovery = append(k.recovery, took)
			k.Waited = max(k.Waited, waited)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(kinds)) {
		k := kinds[name]
		if slices.Sort(k.recovery); len(k.recovery) > 0 {
			k.Median, k.Worst = k.recovery[len(k.recovery)/2], k.recovery[len(k.recovery)-1]
		}
		r.Kinds = append(r.Kinds, k)
	}
}

// waited returns the longest time that an event waited in a round. The caller holds mu.
func (r *Report) waited(p *round) (most float64) {
	for _, s := range r.Samples {
		if at := r.began.Add(time.Duration(s.At * float64(time.Second))); at.After(p.At) && !at.After(p.Recovered) {
			most = max(most, s.Oldest)
		}
	}
	return most
}

// tell prints the report and writes it to its folder. A broken promise is an error.
func (c *campaign) tell(o cli.IO) error {
	c.progress.End()
	r := c.report
	var err error
	if c.options.Report != "" {
		err = r.write(c.options.Report)
	}
	if c.options.JSON {
		err = errors.Join(err, o.JSON(r))
	} else {
		r.print(o.Stdout)
		if c.options.Report != "" {
			fmt.Fprintf(o.Stdout, "\nThe report is in %s\n", c.options.Report)
		}
	}
	if err == nil && !r.Holds {
		err = cli.ErrSaid
	}
	return err
}

func (r *Report) write(dir string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the report: %w", err)
	}
	for name, content := range map[string]string{
		"report.json": string(text) + "\n", "report.md": r.page(), "timeline.svg": r.chart(),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
	}
	return nil
}

func (r *Report) print(w io.Writer) {
	t := cli.Table(w)
	fmt.Fprintln(t, "FAULT\tALONE\tIN PAIRS\tRECOVERY MEDIAN\tWORST\tLONGEST WAIT")
	for _, k := range r.Kinds {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.1f s\t%.1f s\t%.1f s\n", k.Name, k.Alone, k.InPairs, k.Median, k.Worst, k.Waited)
	}
	_ = t.Flush()
	fmt.Fprintln(w)
	for _, line := range r.sentences() {
		fmt.Fprintln(w, line)
	}
	if r.Broken == nil {
		return
	}
	fmt.Fprintf(w, "\nBROKEN: %s: %s\n", r.Broken.Promise, r.Broken.What)
	for _, line := range r.Story {
		fmt.Fprintln(w, " ", line)
	}
	fmt.Fprintf(w, "The same plan again: %s\n", r.Command)
}

func (r *Report) sentences() []string {
	n := r.Counts
	comma := func(i int) string { return humanize.Comma(int64(i)) }
	list := []string{
		fmt.Sprintf("%s events committed, %s rolled back, %s commits unanswered; %d faults in %d rounds, seed %d, %v",
			comma(n.Committed), comma(n.RolledBack), comma(n.Unclear), n.Faults-n.Failed, len(r.Rounds), r.Seed,
			time.Duration(r.Seconds)*time.Second),
		fmt.Sprintf("%s orders for %s keys, %s answers repeated; %s effects with the inbox, %s redeliveries without",
			comma(n.Orders), comma(n.Keys), comma(n.Repeated), comma(n.Effects), comma(n.Redelivered)),
		fmt.Sprintf("%s forgot something %d times; %s events of it were older than --restore",
			map[bool]string{false: "Redis", true: "NATS"}[r.Settings["sink"] == sinkNats], n.Forgot, comma(n.Expired)),
		fmt.Sprintf("beyond what is documented, readiness was green for %.0f s while nothing flowed, and red for "+
			"%.0f s while everything did; the verdict was wrong for %.0f s", r.Lies.Green, r.Lies.Red, r.Lies.Verdict),
		fmt.Sprintf("WAL held back at most: %.0f MiB", float64(r.WALMost)/(1<<20)),
	}
	if r.Interrupted {
		list = append(list, "The campaign was interrupted.")
	}
	if r.Holds {
		list = append(list, fmt.Sprintf("lost 0, duplicated 0, phantom 0, reordered 0, corrupted 0; orders per key 1; "+
			"overspent 0: every promise was kept, %s of %s events verified in the streams", comma(n.Found),
			comma(n.Committed-n.Expired)))
	}
	return list
}

// page is the report as Markdown.
func (r *Report) page() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# A campaign of faults\n\n%s, on %s with %d cores", r.At.Format("2006-01-02 15:04 UTC"),
		r.Machine.Platform, r.Machine.Cores)
	for _, name := range slices.Sorted(maps.Keys(r.Machine.Versions)) {
		fmt.Fprintf(&b, ", %s %s", name, r.Machine.Versions[name])
	}
	fmt.Fprintf(&b, ".\n\n```text\n%s\n```\n\n", r.Command)
	for _, line := range r.sentences() {
		fmt.Fprintf(&b, "- %s\n", line)
	}
	b.WriteString("\n| fault | what is done | alone | in pairs | recovery, median | worst | longest wait |\n" +
		"|---|---|---|---|---|---|---|\n")
	for _, k := range r.Kinds {
		fmt.Fprintf(&b, "| `%s` | %s | %d | %d | %.1f s | %.1f s | %.1f s |\n", k.Name, k.About, k.Alone, k.InPairs,
			k.Median, k.Worst, k.Waited)
	}
	b.WriteString("\n![timeline](timeline.svg)\n")
	if r.Broken != nil {
		fmt.Fprintf(&b, "\n## Broken: %s\n\n%s\n\n```\n%s\n```\n", r.Broken.Promise, r.Broken.What,
			strings.Join(r.Story, "\n"))
	}
	return b.String()
}
