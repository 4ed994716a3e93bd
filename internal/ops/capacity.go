package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

// minSpan is the shortest time from which a rate is computed.
const minSpan = 10 * time.Minute

// capacity reports what grows in Postgres, how fast, and for how long the space lasts.
func (d *doctor) capacity(ctx context.Context, conn *pgx.Conn, f facts) {
	var logBytes int64
	var oldest *time.Time
	err := conn.QueryRow(ctx, query("doctor_capacity")).Scan(&logBytes, &oldest)
	if err != nil {
		d.warn("capacity", mayRead, "cannot be read: %v", OneLine(err))
		return
	}
	d.wal(ctx, conn, f)
	d.ok("capacity outbox", "the log takes %s, with what was delivered", Size(logBytes))
	d.history(logBytes, oldest, time.Now())
	if names, err := sql.Streams(ctx, conn); err == nil {
		d.names = names
	}
}

// wal reports how fast WAL is written, and how long its space lasts.
func (d *doctor) wal(ctx context.Context, conn *pgx.Conn, f facts) {
	var walBytes int64
	var walSeconds float64
	if conn.QueryRow(ctx, query("doctor_wal")).Scan(&walBytes, &walSeconds) != nil {
		return // see refusals
	}
	budget := Size(d.config.WALBudget)
	rate := float64(walBytes) / max(walSeconds, 1)
	if time.Duration(walSeconds)*time.Second < minSpan {
		d.ok("capacity wal", "the slot may hold %s; too early to say how fast WAL is written", budget)
	} else {
		detail := fmt.Sprintf("WAL is written at %s/h on average; the budget of %s lasts %s while Redis is down",
			Size(int64(rate*3600)), budget, lasts(float64(d.config.WALBudget), rate))
		if f.keepMB > 0 {
			detail += fmt.Sprintf(", max_slot_wal_keep_size of %s lasts %s while no relay runs", Size(f.keepMB<<20),
				lasts(float64(f.keepMB<<20), rate))
		}
		d.ok("capacity wal", "%s", detail)
	}
}

// history reports the growth of the log. Its oldest mark is about as old as its oldest events.
func (d *doctor) history(bytes int64, oldest *time.Time, now time.Time) {
	keep := d.config.History
	if keep == 0 {
		d.ok("capacity history", "none is kept (--history=0)")
		return
	}
	if oldest == nil || now.Sub(*oldest) < minSpan {
		d.ok("capacity history", "%s, kept for %v; too early to say how fast it grows", Size(bytes), keep)
		return
	}
	perDay := float64(bytes) / min(now.Sub(*oldest), keep).Hours() * 24
	d.ok("capacity history", "%s now, about %s a day; kept for %v it takes up to %s", Size(bytes),
		Size(int64(perDay)), keep, Size(int64(perDay*keep.Hours()/24)))
}

// retentionSlack is how late deletion may be.
const retentionSlack = time.Hour

// log checks that unsettled events can be found, and that expired ones are deleted.
func (d *doctor) log(ctx context.Context, conn *pgx.Conn) {
	changes, err := sql.Changes(ctx, conn)
	if err != nil {
		d.fail("table", mayRead, "%v", OneLine(err))
	}
	for _, c := range changes {
		d.fail("table", c.Remedy, "%s", c.What)
	}
	var left int64
	var oldest *time.Time
	err = conn.QueryRow(ctx, query("doctor_log"), d.config.History+retentionSlack).Scan(&left, &oldest)
	if err != nil {
		d.warn("marks", mayRead, "cannot be read: %v", OneLine(err))
		return
	}
	switch {
	case oldest == nil:
		d.ok("marks", "none was written yet: nothing is settled")
	case d.config.History > 0 && left > 0:
		d.warn("marks", "let a relay run: it deletes what is past --history; see its log for why it cannot",
			"the oldest is of %s, and %d are left of before --history (%v): the log is not shortened",
			oldest.UTC().Format(time.RFC3339), left, d.config.History)
	default:
		d.ok("marks", "the oldest is of %s", oldest.UTC().Format(time.RFC3339))
	}
}

// ledger checks the credits in Postgres.
func (d *doctor) ledger(ctx context.Context, conn *pgx.Conn) {
	if !d.shop {
		return
	}
	frozen, err := credits.FrozenAccounts(ctx, conn)
	if err != nil {
		return // missing rights were reported already
	}
	buckets, err := credits.LedgerBuckets(ctx, conn)
	if err != nil || len(buckets) == 0 && len(frozen) == 0 {
		return // credits are not in use
	}
	d.credits = true
	if n := len(frozen); n > 0 {
		d.warn("credit accounts",
			"posthaste credits reconcile says why, posthaste credits unfreeze releases them; see docs/credits.md",
			"%d frozen: their operations contradict the ledger", n)
	} else {
		d.ok("credit accounts", "none is frozen")
	}
	bumped := 0
	var last time.Time
	for _, b := range buckets {
		if b.BumpedAt != nil {
			bumped++
			if b.BumpedAt.After(last) {
				last = *b.BumpedAt
			}
		}
	}
	if bumped > 0 && time.Since(last) < 24*time.Hour {
		d.warn("credit epochs", "posthaste credits reconcile; raise the durability if Redis may lose data",
			"Redis lost operations of %d of %d buckets, last %s", bumped, len(buckets), humanize.Time(last))
	} else {
		d.ok("credit epochs", "%d buckets, no loss within a day", len(buckets))
	}
}

// balances reports balances in Redis that belong to another database. Credit requests are refused then; without credits
// in this database that is only a warning.
func (d *doctor) balances(ctx context.Context, client redis.UniversalClient) {
	if !d.shop {
		return
	}
	theirs, err := credits.Owner(ctx, client)
	if err != nil || theirs == "" || d.source == uuid.Nil || theirs == d.source.String() {
		return
	}
	severity := SeverityWarn
	if d.credits {
		severity = SeverityFail
	}
	d.add(severity, "credit balances", credits.ForeignRemedy,
		"those in this Redis are of another database (%s): credits of this one are refused", theirs)
}

// functions reports whether the credits' function library is loaded, or could be.
func (d *doctor) functions(ctx context.Context, client *redis.Client) {
	if !d.shop {
		return
	}
	list, err := client.FunctionList(ctx, redis.FunctionListQuery{LibraryNamePattern: "posthaste_credits*"}).Result()
	switch {
	case err != nil:
		d.warn("redis functions",
			"use Redis 7 or later, and grant FUNCTION and FCALL (only credits need them)", "%v", OneLine(err))
	case len(list) == 0:
		d.ok("redis functions", "the credits' library is loaded at its first use")
	default:
		names := make([]string, len(list))
		for i, l := range list {
			names[i] = l.Name
		}
		d.ok("redis functions", "%s loaded", strings.Join(names, ", "))
	}
}

const sampledStreams = 50

// streams reports the memory of the streams, and how long the rest of Redis' memory lasts.
func (d *doctor) streams(ctx context.Context, client *redis.Client, memory map[string]string) {
	var length, bytes int64
	var rate float64 // bytes per second
	for _, name := range d.names[:min(len(d.names), sampledStreams)] {
		n, err := client.XLen(ctx, name).Result()
		if err != nil || n == 0 {
			continue // not a stream, or missing: the publisher reports it
		}
		b, err := client.MemoryUsage(ctx, name, 5).Result()
		if err != nil {
			d.ok("capacity redis", "cannot be measured: %v", OneLine(err))
			return
		}
		length, bytes = length+n, bytes+b
		first, err1 := client.XRangeN(ctx, name, "-", "+", 1).Result()
		last, err2 := client.XRevRangeN(ctx, name, "+", "-", 1).Result()
		if err1 == nil && err2 == nil && len(first) > 0 && len(last) > 0 {
			if span := entryTime(last[0].ID).Sub(entryTime(first[0].ID)); span >= minSpan {
				rate += float64(b) / span.Seconds()
			}
		}
	}
	used, _ := strconv.ParseInt(strings.TrimSpace(memory["used_memory"]), 10, 64)
	limit, _ := strconv.ParseInt(strings.TrimSpace(memory["maxmemory"]), 10, 64)
	if memory == nil {
		return
	}
	detail := fmt.Sprintf("%s used", Size(used))
	if limit > 0 {
		detail += " of " + Size(limit)
	} else {
		detail += ", no maxmemory"
	}
	if length > 0 {
		detail += fmt.Sprintf("; %s entries in %s take %s, %d bytes each", humanize.Comma(length),
			CountOf(int64(len(d.names)), "stream"), Size(bytes), bytes/length)
		if most := d.config.StreamMaxlen * int64(len(d.names)); most > 0 {
			detail += fmt.Sprintf("; at --stream-maxlen they take %s", Size(most*bytes/length))
		}
	}
	if limit > used && rate > 0 {
		detail += "; untrimmed, the rest lasts " + lasts(float64(limit-used), rate)
	}
	d.ok("capacity redis", "%s", detail)
}

func (d *doctor) sharing(ctx context.Context, client redis.UniversalClient) {
	all, err := sink.Sharing(ctx, client, d.names)
	if err != nil {
		d.warn("shared streams", sink.Remedy(sink.Class(err)), "%v", OneLine(err))
		return
	}
	streams := map[string]int{}
	for _, sources := range all {
		for name := range sources {
			streams[name]++
		}
	}
	names := make([]string, 0, len(streams))
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		names = append(names, fmt.Sprintf("%s (%s)", name, CountOf(int64(streams[name]), "stream")))
	}
	d.ok("shared streams", "%s", cmp.Or(strings.Join(names, ", "), "none yet"))
}

// foreign reports, like the relay, whether a stream belongs to another database. It returns the error with which Redis
// refuses the check for lack of rights.
func (d *doctor) foreign(ctx context.Context, client redis.UniversalClient) error {
	if d.source == uuid.Nil {
		return nil
	}
	s := sink.New(sink.Options{
		Client: client, Source: outbox.EntrySource(d.config.RelayName), Shared: d.config.SharedStreams,
	})
	_, err := s.Look(ctx, d.source, d.names, nil)
	var foreign *outbox.ForeignError
	switch {
	case errors.As(err, &foreign):
		d.fail("foreign stream", foreign.Remedy, "stream %q %s", foreign.Stream, foreign.Reason)
	case sink.Class(err) == "noperm":
		return err
	case err != nil:
		d.warn("foreign stream", sink.Remedy(sink.Class(err)), "%v", OneLine(err))
	}
	return nil
}

// lasts describes how long bytes last at a rate of bytes per second.
func lasts(bytes, rate float64) string {
	const year = 365 * 24 * 3600
	if seconds := bytes / max(rate, 1e-9); seconds < year {
		return span(time.Duration(seconds) * time.Second)
	}
	return "over a year"
}
