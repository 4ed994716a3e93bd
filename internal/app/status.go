package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// Status is the command that shows the status.
type Status struct {
	JSON  bool `name:"json" help:"Print JSON, as GET /relay answers; with --watch one line each time."`
	Watch bool `help:"Refresh every second until interrupted, even while Postgres is unavailable."`
	Check bool `help:"Exit with 0 if all is well, 1 if it is degraded, and 2 if it is broken or cannot be read."`
}

// Run shows the status once, or until ctx ends.
func (c Status) Run(ctx context.Context, config Config, o cli.IO) error {
	if c.Watch {
		return watchStatus(ctx, config, o, c.JSON)
	}
	var s cli.Screen
	err := config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		if s, err = readStatus(ctx, config, pool); err != nil {
			return err
		}
		if c.JSON {
			return o.JSON(s.Report)
		}
		return s.Print(o.Stdout, cli.Colours(o.Stdout))
	})
	switch {
	case !c.Check:
		return err
	case err != nil:
		return &cli.ExitError{Code: 2, Err: err}
	case s.Verdict.Word == ops.Broken.Word():
		return &cli.ExitError{Code: 2, Err: cli.ErrSaid}
	case s.Verdict.Word != ops.OK.Word():
		return &cli.ExitError{Code: 1, Err: cli.ErrSaid}
	}
	return nil
}

// readStatus reads and assesses the status.
func readStatus(ctx context.Context, c Config, pool *pgxpool.Pool) (s cli.Screen, err error) {
	if err := sql.Register(ctx, pool, c.RelayName); err != nil {
		return s, err
	}
	slots, err := c.Slots(pool, nil)
	if err != nil {
		return s, err
	}
	from := ops.Source{
		Pool: pool, RelayName: c.RelayName, Slots: slots, WALBudget: c.WALBudget, NATS: c.SinkURL != "",
		Redis: func(ctx context.Context) (err error) {
			s.Unknown, err = c.sinkReady(ctx)
			return err
		},
		Permitted: c.sinkPermits,
	}
	snap, err := from.Look(ctx)
	if err != nil {
		return s, err
	}
	s.Report, s.Relay = snap.Report(), c.RelayName
	return s, nil
}

// watchInterval is how often a watched status is read; watchTimeout is the time limit of a reading.
const (
	watchInterval = time.Second
	watchTimeout  = 3 * time.Second
)

// watchStatus shows the status until ctx ends. On a terminal it redraws the status, elsewhere it prints a line for each
// reading. If Postgres is down, it reports that and continues.
func watchStatus(ctx context.Context, c Config, o cli.IO, asJSON bool) error {
	cfg, err := sql.PoolConfig(c.PostgresURL, c.Schema, "cli")
	if err != nil {
		return cli.Usage(err.Error())
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	var backlog cli.Trend
	for {
		next := time.Now().Add(watchInterval)
		actx, cancel := context.WithTimeout(ctx, watchTimeout)
		s, err := cli.Screen{}, sql.CheckSchema(actx, pool)
		if err == nil {
			s, err = readStatus(actx, c, pool)
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, new(*outbox.SecondNameError)):
			return err // a retry would fail in the same way
		case err != nil:
			s = unread(err)
		default:
			s.Trend = backlog.Note(time.Now(), s.Backlog.Rows)
		}
		if err := show(o, asJSON, s); err != nil {
			return err
		}
		if pause.For(ctx, time.Until(next)) != nil {
			return nil //nolint:nilerr // interrupted
		}
	}
}

// unread is the status while Postgres cannot be read.
func unread(err error) cli.Screen {
	refused := sql.SQLState(err) != "" || errors.Is(err, sql.ErrSchemaMissing) || errors.Is(err, sql.ErrSchemaNewer)
	snap := ops.Snapshot{Now: time.Now()}
	text := ops.OneLine(err)
	snap.Asked.Postgres = ops.Answer{Error: text, Refused: refused}
	return cli.Screen{Err: errors.New(text), Report: ops.Report{Verdict: ops.Assess(&snap).Brief()}}
}

// show prints one reading of a watch.
func show(o cli.IO, asJSON bool, s cli.Screen) error {
	now := time.Now()
	switch {
	case asJSON && s.Err != nil:
		return json.NewEncoder(o.Stdout).Encode(map[string]string{"error": s.Err.Error()})
	case asJSON:
		return json.NewEncoder(o.Stdout).Encode(s.Report)
	case cli.IsTerminal(o.Stdout):
		var screen strings.Builder
		screen.WriteString("\x1b[H\x1b[2J")
		if err := s.Print(&screen, cli.Colours(o.Stdout)); err != nil {
			return err
		}
		fmt.Fprintf(&screen, "\n%s, every second until Ctrl-C\n", now.Format("15:04:05"))
		_, err := io.WriteString(o.Stdout, screen.String())
		return err
	}
	_, err := fmt.Fprintln(o.Stdout, s.Line(now))
	return err
}
