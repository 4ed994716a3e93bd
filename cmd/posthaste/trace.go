package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/api"
	"posthaste/internal/ops"
	"posthaste/sink"
)

type traceCmd struct {
	ID   string `arg:"" help:"Id of an order or an event, any aggregate id, or, with --user, an idempotency key."`
	User string `help:"The user whose idempotency key ID is."`
	JSON bool   `name:"json" help:"Print JSON."`
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
			var err error
			if id, err = ops.OrderID(ctx, pool, user, api.OrderKey(user, c.ID)); err != nil {
				return err
			}
		}
		client, err := sink.NewClient(e.config.RedisURL)
		if err != nil {
			return &usageError{err.Error()}
		}
		defer client.Close()
		steps, err := ops.Trace(ctx, pool, client, id)
		if err == nil && len(steps) == 0 {
			return errors.New("nothing is known of this id: it never was, or its history has expired")
		}
		// Without Redis it is still told what Postgres knows.
		show := func() error { return printSteps(e.stdout, steps) }
		if c.JSON {
			show = func() error { return e.json(steps) }
		}
		if len(steps) > 0 {
			if perr := show(); perr != nil {
				return perr
			}
		}
		return ofRedis(err)
	})
}

func printSteps(w io.Writer, steps []ops.Step) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, s := range steps {
		at := "-"
		if !s.At.IsZero() {
			at = s.At.UTC().Format("2006-01-02 15:04:05.000000")
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", at, foreign(s.Place), foreign(s.ID), foreign(s.Detail))
	}
	return t.Flush()
}

// foreign is text of somebody else's (an aggregate id, a group's name, a handler's error) for a line of a table: it can neither
// break the line nor steer the terminal.
func foreign(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}

// short is foreign text of at most n characters: one long cell would make every line of its table as long. JSON has all of it.
func short(s string, n int) string {
	r := []rune(foreign(s))
	if len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return string(r)
}
