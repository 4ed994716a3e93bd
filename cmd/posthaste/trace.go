package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/api"
	"posthaste/sql"
)

type traceCmd struct {
	ID   string `arg:"" help:"Id of an order or an event, any aggregate id, or, with --user, an idempotency key."`
	User string `help:"The user whose idempotency key ID is."`
	JSON bool   `name:"json" help:"Print JSON."`
}

// step is one place where a trace has been.
type step struct {
	At    time.Time `json:"at"`
	Place string    `json:"place"`
	// ID is the event's, or the order's.
	ID          string `json:"id"`
	Detail      string `json:"detail"`
	TraceParent string `json:"traceparent,omitempty"`
}

// Run follows an id through orders, outbox, history, dead events, streams and consumer groups.
func (c traceCmd) Run(ctx context.Context, e *env) error {
	var user uuid.UUID
	if c.User != "" {
		var err error
		if user, err = uuid.Parse(c.User); err != nil {
			return &usageError{fmt.Sprintf("user %q is not a UUID", c.User)}
		}
	}
	return e.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		id := c.ID
		if c.User != "" {
			order, err := sql.OrderByKey(ctx, pool, user, api.OrderKey(user, c.ID))
			if err != nil {
				return fmt.Errorf("no order of this user has this key: %w", err)
			}
			id = order.ID.String()
		}
		steps, entries, err := traceTables(ctx, pool, id)
		if err != nil {
			return err
		}
		client, err := consumerClient(e.config.RedisURL)
		if err != nil {
			return err
		}
		defer client.Close()
		for _, en := range entries {
			more, err := traceEntry(ctx, client, en)
			if err != nil {
				return fmt.Errorf("read stream %q: %w", en.Stream, err)
			}
			steps = append(steps, more...)
		}
		if len(steps) == 0 {
			return errors.New("nothing is known of this id: it never was, or its history has expired")
		}
		if c.JSON {
			return e.json(steps)
		}
		return printSteps(e.stdout, steps)
	})
}

func printSteps(w io.Writer, steps []step) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, s := range steps {
		at := "-"
		if !s.At.IsZero() {
			at = s.At.UTC().Format("2006-01-02 15:04:05.000000")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", at, s.Place, s.ID, s.Detail)
	}
	return t.Flush()
}

// traceTables looks at Postgres; entries are the stream entries that history names.
func traceTables(ctx context.Context, pool *pgxpool.Pool, id string) (steps []step, entries []sql.TraceRow, err error) {
	rows, err := sql.Trace(ctx, pool, id)
	if err != nil {
		return nil, nil, err
	}
	for _, r := range rows {
		steps = append(steps, step{At: r.At, Place: r.Place, ID: r.ID, Detail: r.Detail, TraceParent: r.TraceParent})
		if r.EntryID != "" {
			entries = append(entries, r)
		}
	}
	return steps, entries, nil
}

// traceEntry looks at one stream entry and at what every group has done with it.
func traceEntry(ctx context.Context, client *redis.Client, r sql.TraceRow) ([]step, error) {
	found, err := client.XRange(ctx, r.Stream, r.EntryID, r.EntryID).Result()
	if err != nil {
		return nil, err
	}
	s := step{At: entryTime(r.EntryID), Place: "stream", ID: r.ID, Detail: r.Stream + " " + r.EntryID, TraceParent: r.TraceParent}
	if len(found) == 0 {
		s.Detail += " (trimmed since)"
		return []step{s}, nil
	}
	steps := []step{s}
	groups, err := client.XInfoGroups(ctx, r.Stream).Result()
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		state := "acknowledged"
		pending, err := client.XPendingExt(ctx, &redis.XPendingExtArgs{Stream: r.Stream, Group: g.Name, Start: r.EntryID, End: r.EntryID, Count: 1}).Result()
		switch {
		case err != nil:
			return nil, err
		case len(pending) > 0:
			state = fmt.Sprintf("delivered to %s %d times, not acknowledged", pending[0].Consumer, pending[0].RetryCount)
		case before(g.LastDeliveredID, r.EntryID):
			state = "not delivered yet"
		}
		steps = append(steps, step{Place: "group " + g.Name, ID: r.ID, Detail: state})
	}
	return steps, nil
}

// entryTime reads the time in a stream entry's id.
func entryTime(id string) time.Time {
	ms, _ := splitEntry(id)
	return time.UnixMilli(ms)
}

// before compares stream entry ids.
func before(a, b string) bool {
	am, as := splitEntry(a)
	bm, bs := splitEntry(b)
	return am < bm || am == bm && as < bs
}

func splitEntry(id string) (ms, seq int64) {
	_, _ = fmt.Sscanf(id, "%d-%d", &ms, &seq) // Redis' own ids always have this form
	return ms, seq
}
