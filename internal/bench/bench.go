package bench

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/outbox"
)

// step is one measurement of one repetition.
type step struct {
	name string
	// total is how many events or requests are expected; 0 if unknown.
	total int
	run   func(ctx context.Context) error
}

// benchmark runs the steps f.Runs times and prints the report. It returns ErrFound if the result is wrong.
func benchmark(
	ctx context.Context, c app.Config, o cli.IO, f Options, to Sink, r *report, steps func(b *session) []step,
) (err error) {
	if f.Runs < 1 {
		return cli.Usage("--runs must be at least 1")
	}
	if f.Cluster && f.External {
		return cli.Usage("--cluster is for the servers that it starts: with --external name the cluster in --redis-url")
	}
	id := uuid.New()
	b := &session{
		options: f, sink: to, config: c, report: r, name: hex.EncodeToString(id[:4]),
		log: slog.New(slog.NewTextHandler(o.Stderr, &slog.HandlerOptions{Level: max(c.LogLevel, slog.LevelWarn)})),
	}
	defer b.close()
	if err := b.open(ctx, o.Stderr); err != nil {
		return err
	}
	list := steps(b)
	b.progress = &progress{Status: cli.NewStatus(o.Stderr), began: time.Now()}
	for i := range f.Runs * len(list) {
		s := list[i%len(list)]
		if err := b.progress.step(ctx, s, i+1, f.Runs*len(list)); err != nil {
			if ctx.Err() != nil && !errors.Is(err, errLeft) {
				return errors.New("interrupted; everything it created was removed")
			}
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return r.finish(o, f.JSON)
}

// only returns the modes and loads that a flag selects.
func only[T ~string](flag string, all ...T) []T {
	if flag == "both" {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return string(v) != flag })
}

// modes are the values of --mode.
var modes = []outbox.Mode{outbox.ModeCDC, outbox.ModePoll}
