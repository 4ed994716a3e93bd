package prove

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/oracle"
	"posthaste/internal/ops"
)

const (
	// storyRounds is the number of rounds in a story, storyLines the number of lines of each relay's log.
	storyRounds = 5
	storyLines  = 25
)

// story returns everything known about the cause of a broken promise. If a part cannot be read, a line reports that
// instead.
func (c *campaign) story(ctx context.Context, b *oracle.Breach) []string {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	s := &teller{}
	s.say("%s at %s: %s", b.Promise, b.At.UTC().Format(time.RFC3339Nano), b.What)
	if b.Event != "" {
		c.storyOfEvent(ctx, s, b)
	}
	c.storyOfState(ctx, s)
	c.mu.Lock()
	if c.now != "" {
		s.say("faults at work: %s", c.now)
	}
	c.mu.Unlock()
	c.report.mu.Lock()
	rounds := c.report.Rounds[max(0, len(c.report.Rounds)-storyRounds):]
	for _, p := range rounds {
		for _, f := range p.Faults {
			s.say("fault in round %d (%s): %s %s at %s, healed at %s %s", p.Number, p.Mode, f.Fault, f.What,
				clock(f.At), clock(f.Healed), f.Failed)
		}
	}
	c.report.mu.Unlock()
	for _, p := range c.relays {
		for _, line := range lastLines(p.log, storyLines) {
			s.say("%s: %s", p.name, line)
		}
	}
	return s.lines
}

func clock(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format("15:04:05.000")
}

// teller collects lines.
type teller struct{ lines []string }

func (s *teller) say(format string, args ...any) {
	s.lines = append(s.lines, ops.Printable(strings.TrimRight(fmt.Sprintf(format, args...), " ")))
}

// storyOfEvent adds the records that writers, Postgres and Redis have of an event.
func (c *campaign) storyOfEvent(ctx context.Context, s *teller, b *oracle.Breach) {
	id, err := uuid.Parse(b.Event)
	if err != nil {
		return
	}
	subject := b.Subject
	if r, ours := c.truth.Of(id); ours {
		if a := c.truth.Aggregate(r.Aggregate); a != nil {
			subject = a.ID
			s.say("event %s: number %d of aggregate %s; its writer says: %s", id, r.N, a.ID, c.truth.State(r))
		}
	}
	rows, _ := c.stage.pool.Query(ctx, `SELECT seq, part, xid::text, created_at,
			coalesce((SELECT pg_catalog.string_agg(published_at::text || ' by ' || mode, ', ') FROM outbox_history h
				WHERE h.id = o.id), 'not settled'),
			coalesce((SELECT pg_catalog.string_agg(m.id::text || ' ' || m.at::text || ' epoch ' || m.epoch::text ||
				' settled ' || coalesce(m.settled::text, '-') || ' hi ' || coalesce(m.hi::text, '-'),
				E'\n' ORDER BY m.id)
				FROM (SELECT * FROM outbox_mark WHERE part IN (o.part, -1) AND at > o.created_at
					ORDER BY id LIMIT 5) m),
				'')
		FROM outbox_rows o WHERE id = $1`, id)
	var seq int64
	var part int16
	var xid, settled, marks string
	var created time.Time
	_, err = pgx.ForEachRow(rows, []any{&seq, &part, &xid, &created, &settled, &marks}, func() error {
		s.say("outbox: row %d of part %d, transaction %s, created %s; history: %s", seq, part, xid, clock(created),
			settled)
		for line := range strings.Lines(marks) {
			s.say("mark %s", strings.TrimSpace(line))
		}
		return nil
	})
	if err != nil {
		s.say("Postgres does not tell: %v", err)
	}
	if c.options.Sink != sinkNats {
		steps, err := ops.Trace(ctx, c.stage.pool, c.stage.client, b.Event)
		for _, step := range steps {
			s.say("trace: %s %s %s", clock(step.At), step.Place, step.Detail)
		}
		if err != nil {
			s.say("trace: %v", err)
		}
	}
	c.storyOfStream(ctx, s, b, subject)
}

// storyOfStream adds the last entries of the event's aggregate, up to shortly after the event.
func (c *campaign) storyOfStream(ctx context.Context, s *teller, b *oracle.Breach, subject string) {
	if b.Stream == "" {
		return
	}
	to := "+"
	if b.Entry != "" {
		ms, rest, _ := strings.Cut(b.Entry, "-")
		at, _ := strconv.ParseInt(ms, 10, 64) // the sink wrote it, so it is valid
		to = fmt.Sprintf("%d-%s", at+2000, rest)
	}
	list, err := c.stage.streams.Newest(ctx, b.Stream, to, 5000)
	if err != nil {
		s.say("the sink does not tell: %v", err)
	}
	told := 0
	for _, m := range list {
		e, err := oracle.ParseEntry(b.Stream, m)
		if err != nil || e.Subject != subject && e.ID.String() != b.Event || told == 10 {
			continue
		}
		told++
		n := ""
		if r, ours := c.truth.Of(e.ID); ours {
			n = fmt.Sprintf(", number %d", r.N)
		}
		s.say("stream: %s entry %s is event %s of %s%s", b.Stream, m.ID, e.ID, e.Subject, n)
	}
}

// storyOfState adds the state of the relay and the slot.
func (c *campaign) storyOfState(ctx context.Context, s *teller) {
	var text string
	for what, query := range map[string]string{
		"relay_state": "SELECT pg_catalog.to_jsonb(r)::text FROM relay_state r",
		"wal": "SELECT pg_current_wal_lsn()::text || ' written, ' || pg_current_wal_flush_lsn()::text || " +
			"' on disk'",
		"slot": "SELECT coalesce(pg_catalog.string_agg(pg_catalog.to_jsonb(r)::text, ' '), 'none') " +
			"FROM pg_replication_slots r WHERE slot_name LIKE 'posthaste%'::text",
		"backlog": "SELECT count(*)::text || ' events, ' || pg_catalog.count(DISTINCT part)::text || ' parts' " +
			"FROM outbox_backlog",
		"dead": "SELECT count(*)::text FROM outbox_dead",
		"repairs": "SELECT coalesce(pg_catalog.string_agg(pg_catalog.to_jsonb(r)::text, ' ' ORDER BY r.id), " +
			"'none') FROM (SELECT * FROM outbox_reconcile ORDER BY id DESC LIMIT 4) r",
	} {
		if err := c.stage.pool.QueryRow(ctx, query).Scan(&text); err != nil {
			text = err.Error()
		}
		s.say("%s: %s", what, text)
	}
	for i, l := range c.honesty.looks() {
		s.say("%s: readiness %d %s %s %s", c.relays[i].name, l.Status, l.Role, strings.Join(l.Reasons, "; "),
			strings.Join(l.Degraded, "; "))
	}
}

// lastLines returns the last lines of a file.
func lastLines(name string, n int) []string {
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	if st, err := f.Stat(); err == nil {
		_, _ = f.Seek(max(0, st.Size()-64<<10), 0)
	}
	var lines []string
	for scan := bufio.NewScanner(f); scan.Scan(); {
		lines = append(lines, scan.Text())
	}
	return lines[max(0, len(lines)-n):]
}
