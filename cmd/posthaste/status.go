package main

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
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

type statusCmd struct {
	JSON  bool `name:"json" help:"Print JSON, as GET /relay answers; with --watch one line each time."`
	Watch bool `help:"Refresh every second until interrupted, even while Postgres is unavailable."`
	Check bool `help:"Exit with 0 if all is well, 1 if it is degraded, and 2 if it is broken or cannot be read."`
}

// Run shows the status.
func (c statusCmd) Run(ctx context.Context, e *env) error {
	if c.Watch {
		return c.watch(ctx, e)
	}
	var s cli.Screen
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		if s, err = e.readStatus(ctx, pool); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(s.Report)
		}
		return s.Print(e.Stdout, cli.Colours(e.Stdout))
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
func (e *env) readStatus(ctx context.Context, pool *pgxpool.Pool) (s cli.Screen, err error) {
	if err := sql.Register(ctx, pool, e.config.RelayName); err != nil {
		return s, err
	}
	slots, err := e.config.Slots(pool, nil)
	if err != nil {
		return s, err
	}
	from := ops.Source{
		Pool: pool, RelayName: e.config.RelayName, Slots: slots, WALBudget: e.config.WALBudget,
		Redis: func(ctx context.Context) (err error) {
			s.Unknown, err = e.redisReady(ctx)
			return err
		},
	}
	snap, err := from.Look(ctx)
	if err != nil {
		return s, err
	}
	s.Report, s.Relay = snap.Report(), e.config.RelayName
	return s, nil
}

// redisReady returns why Redis takes no events from this machine, or what it keeps unknown. The check is necessary
// because Postgres has no record of an unreachable Redis until events are late.
func (e *env) redisReady(ctx context.Context) (unknown []string, err error) {
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	s := sink.New(sink.Options{Client: client, Durability: e.config.Durability})
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	unknown, _ = s.Unknown(ctx) // events flow even if this fails
	return unknown, nil
}

// watchInterval is how often a watched status is read; watchTimeout is the time limit of a reading.
const (
	watchInterval = time.Second
	watchTimeout  = 3 * time.Second
)

// watch shows the status until ctx ends. On a terminal it redraws the status, elsewhere it prints a line for each
// reading. If Postgres is down, it reports that and continues.
func (c statusCmd) watch(ctx context.Context, e *env) error {
	cfg, err := sql.PoolConfig(e.config.PostgresURL, e.config.Schema, "cli")
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
	t := time.NewTicker(watchInterval)
	defer t.Stop()
	for {
		actx, cancel := context.WithTimeout(ctx, watchTimeout)
		s, err := cli.Screen{}, sql.CheckSchema(actx, pool)
		if err == nil {
			s, err = e.readStatus(actx, pool)
		}
		cancel()
		var second *outbox.SecondNameError
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, &second):
			return err // a retry would fail in the same way
		case err != nil:
			s = unread(cli.OneLine(err))
		default:
			s.Trend = backlog.Note(time.Now(), s.Backlog.Rows)
		}
		if err := c.show(e, s); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// unread is the status while Postgres cannot be read.
func unread(err error) cli.Screen {
	refused := sql.SQLState(err) != "" || errors.Is(err, sql.ErrSchemaMissing) || errors.Is(err, sql.ErrSchemaNewer)
	snap := ops.Snapshot{Now: time.Now()}
	snap.Asked.Postgres = ops.Answer{Error: err.Error(), Refused: refused}
	return cli.Screen{Err: err, Report: ops.Report{Verdict: ops.Assess(&snap).Brief()}}
}

// show prints one reading of a watch.
func (c statusCmd) show(e *env, s cli.Screen) error {
	now := time.Now()
	switch {
	case c.JSON && s.Err != nil:
		return json.NewEncoder(e.Stdout).Encode(map[string]string{"error": s.Err.Error()})
	case c.JSON:
		return json.NewEncoder(e.Stdout).Encode(s.Report)
	case cli.IsTerminal(e.Stdout):
		var screen strings.Builder
		screen.WriteString("\x1b[H\x1b[2J")
		if err := s.Print(&screen, cli.Colours(e.Stdout)); err != nil {
			return err
		}
		fmt.Fprintf(&screen, "\n%s, every second until Ctrl-C\n", now.Format("15:04:05"))
		_, err := io.WriteString(e.Stdout, screen.String())
		return err
	}
	_, err := fmt.Fprintln(e.Stdout, s.Line(now))
	return err
}
