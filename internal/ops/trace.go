package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
	"posthaste/sql"
)

// Step is one place where a traced id was found.
type Step struct {
	// At is zero for a consumer group, and for an entry that is not found: Redis does not record when an entry was
	// acknowledged or trimmed.
	At time.Time `json:"at,omitzero"`
	// Place is order, inserted, waiting, in stream, settled, dead, or "group" and the name of a consumer group.
	Place string `json:"place"`
	// ID is the id of the event or the order.
	ID          string `json:"id"`
	Detail      string `json:"detail"`
	TraceParent string `json:"traceparent,omitempty"`

	// order is the time by which steps are sorted: At, or that of the step that this one follows.
	order time.Time
}

// OrderID returns the id of the order that the user placed under an idempotency key, given in its stored form.
func OrderID(ctx context.Context, db sql.DB, user uuid.UUID, key [16]byte) (string, error) {
	order, err := sql.OrderByKey(ctx, db, user, key)
	if err != nil {
		return "", fmt.Errorf("no order of this user has this key: %w", err)
	}
	return order.ID.String(), nil
}

// ErrUnknownID means that an id was not found. It may be an idempotency key: those are found only with their user.
var ErrUnknownID = errors.New("this id is unknown: it never existed, or its history has expired; " +
	"an idempotency key is found only with its user")

// traceRows bounds the rows of one id: an aggregate may have any number of events, and the relay, which answers the
// console, has a bounded memory.
const traceRows = 200

// Trace follows an id (of an order, an event or any aggregate) through orders, outbox, history, dead events, streams
// and consumer groups, in the order of time. Of an aggregate with many events it returns the newest. If Redis fails, it
// returns the rows of Postgres and the error. Without any step, the error is ErrUnknownID or that of the search.
func Trace(ctx context.Context, db sql.DB, client redis.UniversalClient, id string) ([]Step, error) {
	rows, err := traceRowsOf(ctx, db, id, traceRows+1)
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		return nil, ErrUnknownID
	}
	steps := make([]Step, 0, len(rows))
	if len(rows) > traceRows {
		rows = rows[1:]
		steps = append(steps,
			Step{Place: "earlier", ID: id, Detail: fmt.Sprintf("left out: these are the newest %d", traceRows)})
	}
	pages := tracePages
	var unread error
	for _, r := range rows {
		step := func(at time.Time, place, detail string) {
			steps = append(steps, Step{
				At: at, Place: place, ID: r.ID, Detail: detail, TraceParent: r.TraceParent, order: at,
			})
		}
		if r.Type != "" {
			step(r.Created, "inserted", r.Type)
		}
		step(r.At, r.Place, r.Detail)
		if r.UpTo == "" || unread != nil {
			continue
		}
		more, err := traceEntry(ctx, client, r, &pages)
		if err != nil {
			unread = fmt.Errorf("read stream %q: %w", r.Stream, err)
		}
		steps = append(steps, more...)
	}
	slices.SortStableFunc(steps, func(a, b Step) int { return a.order.Compare(b.order) })
	return steps, unread
}

// Bounds of the search for the entries of a trace. entrySlack is the assumed difference of clocks.
const (
	tracePage  = 200
	tracePages = 250
	entrySlack = 5 * time.Minute
)

// findEntry searches for the entry of an event: up to the last entry of the mark that settled it, then among restored
// entries, which are younger. It decrements pages; "" if the entry is not found or no pages are left.
func findEntry(ctx context.Context, client redis.UniversalClient, r traceRow, pages *int) (string, error) {
	entry, err := entryBetween(ctx, client, r, r.Created, r.UpTo, pages)
	if err != nil || entry != "" || r.Restored == "" {
		return entry, err
	}
	return entryBetween(ctx, client, r, r.Since, r.Restored, pages)
}

// entryBetween searches backwards from the entry to until the time from.
func entryBetween(ctx context.Context, client redis.UniversalClient, r traceRow, from time.Time, to string,
	pages *int,
) (string, error) {
	to = cmp.Or(to, "+")
	for ; *pages > 0; *pages-- {
		page, err := client.XRevRangeN(ctx, r.Stream, to, "-", tracePage).Result()
		if err != nil {
			return "", err
		}
		for _, e := range page {
			if e.Values["id"] == r.ID && e.Values["replayed"] != "1" {
				return e.ID, nil
			}
			if entryTime(e.ID).Before(from.Add(-entrySlack)) {
				return "", nil
			}
		}
		if len(page) < tracePage {
			return "", nil
		}
		to = "(" + page[len(page)-1].ID
	}
	return "", nil
}

// traceEntry reads one stream entry and its state in every group.
func traceEntry(ctx context.Context, client redis.UniversalClient, r traceRow, pages *int) ([]Step, error) {
	entry, err := findEntry(ctx, client, r, pages)
	if err != nil {
		return nil, err
	}
	if entry == "" {
		return []Step{{
			Place: "in stream", ID: r.ID, Detail: r.Stream + " (not found: trimmed since)", order: r.At,
		}}, nil
	}
	found, err := client.XRange(ctx, r.Stream, entry, entry).Result()
	if err != nil {
		return nil, err
	}
	s := Step{
		At: entryTime(entry), Place: "in stream", ID: r.ID, Detail: r.Stream + " " + entry,
		TraceParent: r.TraceParent,
	}
	s.order = slices.MaxFunc([]time.Time{s.At, r.Created}, time.Time.Compare) // an entry's time has milliseconds only
	if len(found) == 0 {
		s.Detail += " (trimmed since)"
		return []Step{s}, nil
	}
	steps := []Step{s}
	groups, err := client.XInfoGroups(ctx, r.Stream).Result()
	if err != nil {
		return nil, err
	}
	after := slices.MaxFunc([]time.Time{s.order, r.At}, time.Time.Compare)
	for _, g := range groups {
		state := "acknowledged"
		pending, err := client.XPendingExt(ctx, &redis.XPendingExtArgs{
			Stream: r.Stream, Group: g.Name, Start: entry, End: entry, Count: 1,
		}).Result()
		switch {
		case err != nil:
			return nil, err
		case len(pending) > 0:
			state = fmt.Sprintf("pending: delivered to %s %s, not acknowledged", pending[0].Consumer,
				CountOf(pending[0].RetryCount, "time"))
		case outbox.CompareIDs(g.LastDeliveredID, entry) < 0:
			state = "not delivered yet"
		}
		steps = append(steps, Step{Place: "group " + g.Name, ID: r.ID, Detail: state, order: after})
	}
	return steps, nil
}

// entryTime returns the time in a stream entry's id.
func entryTime(id string) time.Time {
	half, _, _ := strings.Cut(id, "-")
	ms, _ := strconv.ParseInt(half, 10, 64) // ids made by Redis always have this form
	return time.UnixMilli(ms)
}
