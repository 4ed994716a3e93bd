package app

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

// Doctor is the command that checks everything the relay needs.
type Doctor struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run prints every finding and the verdict, and fails if the relay could not run safely in the desired mode.
func (c Doctor) Run(ctx context.Context, config Config, out cli.IO) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	o, err := config.doctorOptions(ctx)
	if err != nil {
		return err
	}
	d := ops.Diagnose(ctx, o)
	if c.JSON {
		err = out.JSON(d)
	} else {
		err = out.Diagnosis(d)
	}
	if err == nil && !d.OK {
		err = cli.ErrSaid
	}
	return err
}

// doctorOptions returns the settings that the doctor measures against.
func (c Config) doctorOptions(ctx context.Context) (ops.DoctorOptions, error) {
	var check func(ctx context.Context) error
	if c.SinkURL != "" {
		check = c.natsReady
	}
	client, err := c.redisOptions(ctx, c.RedisURL)
	if err != nil {
		return ops.DoctorOptions{}, err
	}
	var guard *redis.UniversalOptions
	if c.GuardRedisURL != "" {
		if guard, err = c.redisOptions(ctx, c.GuardRedisURL); err != nil {
			return ops.DoctorOptions{}, err
		}
	}
	return ops.DoctorOptions{
		PostgresURL: c.PostgresURL, Redis: client, NATS: check, Schema: c.Schema, RelayName: c.RelayName,
		Slot: c.Slot, Publication: c.Publication,
		WALBudget: c.WALBudget, StreamMaxlen: c.StreamMaxlen, History: c.History, Durability: c.RedisDurability,
		SharedStreams: c.SharedStreams.On(), Restore: c.Restore, Guard: guard,
	}, nil
}
