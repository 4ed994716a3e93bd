package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/cdc"
	"posthaste/internal/cli"
	"posthaste/sql"
)

// OneShotTimeout bounds a command that only reads or sets something.
const OneShotTimeout = 15 * time.Second

// WithPool runs do with a pool on a migrated schema, within OneShotTimeout.
func (c Config) WithPool(ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool) error) error {
	return c.WithDatabase(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := c.CheckSchema(ctx, pool); err != nil {
			return err
		}
		return do(ctx, pool)
	})
}

// CheckSchema is sql.CheckSchema with the names of database and schema in its error: often the schema exists
// elsewhere.
func (c Config) CheckSchema(ctx context.Context, pool *pgxpool.Pool) error {
	err := sql.CheckSchema(ctx, pool)
	if errors.As(err, new(interface{ Condition() string })) {
		return fmt.Errorf("database %q, --schema=%s: %w", pool.Config().ConnConfig.Database, c.Schema, err)
	}
	return err
}

// WithDatabase is WithPool without the check of the schema.
func (c Config) WithDatabase(ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, OneShotTimeout)
	defer cancel()
	cfg, err := sql.PoolConfig(c.PostgresURL, c.Schema, "cli")
	if err != nil {
		return cli.Usage(err.Error())
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	return do(ctx, pool)
}

// Slots returns the manager of the slot and the publication. log may be nil.
func (c Config) Slots(pool *pgxpool.Pool, log *slog.Logger) (*cdc.Slots, error) {
	return cdc.NewSlots(cdc.Options{
		Pool: pool, Schema: c.Schema, Slot: c.Slot, Publication: c.Publication, Logger: log,
	})
}
