package prove

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// stopGrace bounds an orderly stop. It is longer than the drain timeout of the processes.
const stopGrace = 30 * time.Second

// The processes that a fault chooses from. The leader is chosen in two thirds of the cases.
func aRelay(c *campaign, r *rand.Rand) []*process {
	if i := c.honesty.leader(); i >= 0 && r.IntN(3) > 0 {
		return c.relays[i : i+1]
	}
	return one(c.relays, r)
}
func allRelays(c *campaign, _ *rand.Rand) []*process { return c.relays }
func aServe(c *campaign, r *rand.Rand) []*process    { return one(c.serves, r) }
func aConsumer(c *campaign, r *rand.Rand) []*process { return one(c.consumers, r) }

func one(list []*process, r *rand.Rand) []*process {
	i := r.IntN(len(list))
	return list[i : i+1]
}

// choice selects processes.
type choice func(c *campaign, r *rand.Rand) []*process

// each returns an injection that calls do for all chosen processes, and undo when it heals.
func each(choose choice, do, undo func(p *process) error) injection {
	return func(_ context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		list := choose(c, r)
		names := make([]string, len(list))
		for i, p := range list {
			names[i] = p.name
		}
		undone := func(context.Context) error { return all(list, undo) }
		return strings.Join(names, ", "), undone, all(list, do)
	}
}

// all calls do for all processes, and joins the errors.
func all(list []*process, do func(p *process) error) (err error) {
	for _, p := range list {
		err = errors.Join(err, do(p))
	}
	return err
}

func killed(choose choice) injection { return each(choose, (*process).kill, (*process).start) }
func frozen(choose choice) injection { return each(choose, (*process).freeze, (*process).thaw) }

func stopped(choose choice) injection {
	return func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		return each(choose, func(p *process) error {
			code, err := p.stop(stopGrace)
			if err == nil && code != 0 {
				c.breaks("exit", uuid.Nil, "", "%s ended with exit code %d after SIGTERM", p.name, code)
			}
			return err
		}, (*process).start)(ctx, c, r)
	}
}

// flap switches the desired mode repeatedly until it is healed.
func flap(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	ctx, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			mode := []outbox.Mode{outbox.ModePoll, outbox.ModeCDC, outbox.ModeAuto}[i%3]
			_ = c.desire(ctx, mode) // Postgres may be unavailable
			pause.For(ctx, 300*time.Millisecond)
		}
	}()
	return "", func(context.Context) error {
		stop()
		<-done
		return nil
	}, nil
}
