// Package shadow observes an outbox that another relay publishes. It publishes nothing and writes to no table: it reads
// the rows that are committed, and the streams that the relay writes to, and compares them.
package shadow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
	"posthaste/sql"
)

// Options describe what is compared. Those that are no flags are set by their Run.
type Options struct {
	// URL and Schema are those of the connection to Postgres.
	URL    string                `kong:"-"`
	Schema string                `kong:"-"`
	Redis  redis.UniversalClient `kong:"-"`
	// ID, Key and OrderBy are columns of Table; without Key the order is not compared. Field is that of an entry.
	Table   string   `required:"" placeholder:"SCHEMA.NAME" help:"The outbox table, as in the catalog."`
	Streams []string `name:"stream" required:"" sep:"none" help:"A stream of the other relay; may be repeated."`
	ID      string   `name:"id" default:"id" placeholder:"COL" help:"Column of the event's id."`
	Key     string   `name:"aggregate-id" placeholder:"COL" help:"Column whose events keep their order; or none."`
	Field   string   `name:"entry-id" default:"id" placeholder:"FIELD"` // see help.txt
	Poll    bool     `help:"Read the table again and again instead of the WAL."`
	OrderBy string   `placeholder:"COL" help:"With --poll: a column that grows with each row."`
	// For is how long rows are read; Grace how long a relay may take for an event.
	For   time.Duration `default:"0" help:"How long; 0 until it is interrupted."`
	Grace time.Duration `default:"30s" help:"An event in no stream for so long is lost."`
	JSON  bool          `name:"json" help:"Print JSON."`
	// Progress is called now and then with the counts so far; Say with what went wrong and is repeated.
	Progress func(r Report)                   `kong:"-"`
	Say      func(format string, args ...any) `kong:"-"`
}

// Check returns an error for options that are wrong in every database.
func (o Options) Check() error {
	schema, name, _ := strings.Cut(o.Table, ".")
	switch {
	case schema == "" || name == "":
		return fmt.Errorf("--table %q: want SCHEMA.NAME, as in --table=public.%s", o.Table, o.Table)
	case o.Poll && o.OrderBy == "":
		return errors.New("--poll needs --order-by: a column that grows, such as a serial number or a time")
	}
	return nil
}

// Report is the result of a comparison.
type Report struct {
	Table   string        `json:"table"`
	Streams []string      `json:"streams"`
	Poll    bool          `json:"poll"`
	Began   time.Time     `json:"began"`
	Lasted  time.Duration `json:"lasted_ns"`
	Counts
	// The latency is that from the commit to the entry; there is none with Poll, which does not see commits.
	P50     float64 `json:"p50_ms,omitempty"`
	P99     float64 `json:"p99_ms,omitempty"`
	Longest float64 `json:"longest_ms,omitempty"`
	// Gone is set if entries may have left a stream before they were read: then they count as lost.
	Gone     bool      `json:"entries_gone,omitempty"`
	Findings []Finding `json:"findings"`
}

// Measured reports whether there is a latency.
func (r Report) Measured() bool { return !r.Poll && r.Published > 0 }

// Broken reports whether events were lost, repeated or reordered.
func (r Report) Broken() bool { return r.Lost+r.Repeated+r.Reordered > 0 }

// progressEvery is the interval of Options.Progress.
const progressEvery = 10 * time.Second

// Run compares until Options.For has passed, or ctx ends, and then waits up to Options.Grace for the last events. An
// error ends the comparison; the report has what was seen until then.
func Run(ctx context.Context, o Options) (Report, error) {
	if err := o.Check(); err != nil {
		return Report{}, err
	}
	conn, err := connect(ctx, o)
	if err != nil {
		return Report{}, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	r := &run{o: o, ledger: newLedger(), began: time.Now()}
	r.rows = &rows{o: o, ledger: r.ledger}
	if err := r.rows.check(ctx, conn); err != nil {
		return Report{}, err
	}
	o.Streams = slices.Compact(slices.Sorted(slices.Values(o.Streams)))
	r.o.Streams = o.Streams
	for _, name := range o.Streams {
		s := &stream{name: name, field: o.Field, client: o.Redis, ledger: r.ledger}
		if err := s.open(ctx); err != nil {
			return Report{}, err
		}
		r.streams = append(r.streams, s)
	}
	// Entries are read until the last event had its time, rows only as long as the caller wants.
	sctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	var reading sync.WaitGroup
	for _, s := range r.streams {
		reading.Go(func() { s.run(sctx, o.Say) })
	}
	rctx, end := context.WithCancel(ctx)
	if o.For > 0 {
		rctx, end = context.WithTimeout(ctx, o.For)
	}
	var ticking sync.WaitGroup
	ticking.Go(func() { r.tick(rctx) })
	read := r.rows.slot
	if o.Poll {
		read = r.rows.poll
	}
	err = read(rctx, conn, func() {
		o.Say("reading %s and %s", o.Table, strings.Join(o.Streams, ", "))
	})
	end()
	ticking.Wait()
	if err == nil {
		r.wait()
	}
	stop()
	reading.Wait()
	return r.report(), err
}

// ahead returns how far the clock of a server is ahead of this process's. It was asked at sent, and told is its answer.
func ahead(sent, told time.Time) time.Duration { return told.Sub(sent.Add(time.Since(sent) / 2)) }

func connect(ctx context.Context, o Options) (*pgx.Conn, error) {
	cfg, err := sql.ConnConfig(o.URL, o.Schema, "shadow")
	if err != nil {
		return nil, err
	}
	return sql.Connect(ctx, cfg)
}

type run struct {
	o       Options
	began   time.Time
	ledger  *ledger
	rows    *rows
	streams []*stream
}

func (r *run) tick(ctx context.Context) {
	for pause.For(ctx, progressEvery) == nil {
		r.o.Progress(r.report())
	}
}

// wait waits until every stream is read up to where it ended when wait began, and every event is published or lost. If
// a stream cannot be read, events are left that are neither.
func (r *run) wait() {
	began := time.Now()
	end := began.Add(r.o.Grace + lastWithin)
	for said := false; ; {
		read := r.read()
		c, _ := r.ledger.result(read, r.o.Grace)
		if c.Waiting == 0 && !read.Before(began) || time.Now().After(end) {
			return
		}
		if c.Waiting > 0 && !said {
			said = true
			r.o.Say("waiting up to %v for %d events", r.o.Grace, c.Waiting)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// read is when every stream had been read up to its end.
func (r *run) read() time.Time {
	read := time.Now().UnixNano()
	for _, s := range r.streams {
		read = min(read, s.read.Load())
	}
	return time.Unix(0, read)
}

func (r *run) report() Report {
	now := time.Now()
	p := Report{
		Table: r.o.Table, Streams: r.o.Streams, Poll: r.o.Poll, Began: r.began.UTC(),
		Lasted: now.Sub(r.began).Round(time.Millisecond),
	}
	p.Counts, p.Findings = r.ledger.result(r.read(), r.o.Grace)
	for _, s := range r.streams {
		p.Gone = p.Gone || s.gone.Load()
	}
	if p.Measured() {
		for q, to := range map[float64]*float64{0.5: &p.P50, 0.99: &p.P99, 1: &p.Longest} {
			*to = float64(r.ledger.percentile(q).Round(10*time.Microsecond)) / float64(time.Millisecond)
		}
	}
	return p
}
