package prove

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"posthaste/internal/lab/oracle"
	"posthaste/internal/pause"
)

func postgresStopped(mode string) injection {
	return func(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		err := c.stage.servers.Postgres.Stop(mode)
		return "", func(ctx context.Context) error { return c.stage.servers.Postgres.Start(ctx) }, err
	}
}

// statement returns an injection that runs a statement as the superuser.
func statement(text string) injection {
	return func(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		_, err := c.exec(ctx, text)
		return "", nil, err
	}
}

// exec runs a statement as the superuser, with a timeout.
func (c *campaign) exec(ctx context.Context, text string, args ...any) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tag, err := c.stage.pool.Exec(ctx, text, args...)
	return tag.RowsAffected(), err
}

// affect repeats a statement until it returns or changes a row.
func (c *campaign) affect(ctx context.Context, text string, args ...any) error {
	return repeat(ctx, func() (bool, error) {
		n, err := c.exec(ctx, text, args...)
		return n > 0, err
	})
}

func repeat(ctx context.Context, do func() (done bool, err error)) error {
	for {
		if done, err := do(); done || err != nil {
			return err
		}
		if err := pause.For(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

func setting(name, value string) injection {
	return func(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
		change := func(ctx context.Context, stmt string) error {
			// A new connection, not the pool: the changed setting may affect the pool's sessions.
			return onServer(ctx, c.stage.postgres, "SET default_transaction_read_only = off", stmt,
				"SELECT pg_catalog.pg_reload_conf()")
		}
		err := change(ctx, fmt.Sprintf("ALTER SYSTEM SET %s = '%s'", name, value))
		return value, func(ctx context.Context) error { return change(ctx, "ALTER SYSTEM RESET "+name) }, err
	}
}

// endReader ends the session that reads the slot.
const endReader = "SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_replication_slots " +
	"WHERE slot_name = $1 AND active"

// onSlot returns an injection that runs a statement on the slot while no session reads it. The relay soon connects
// again.
func onSlot(text string) injection {
	return func(ctx context.Context, c *campaign, _ *rand.Rand) (what string, heal healing, err error) {
		for range 20 {
			if _, err = c.exec(ctx, endReader, c.config.Slot); err != nil {
				return "", nil, err
			}
			var n int64
			if n, err = c.exec(ctx, text, c.config.Slot); err == nil && n > 0 {
				return "", nil, nil
			}
			if n == 0 && err == nil {
				err = errors.New("there is no slot")
			}
			pause.For(ctx, 50*time.Millisecond)
		}
		return "", nil, err
	}
}

// slotInvalidated lets the slot retain more WAL than the server allows, while no relay can advance it.
func slotInvalidated(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	_, limit, err := setting("max_slot_wal_keep_size", "1MB")(ctx, c, r)
	if err != nil {
		return "", nil, err
	}
	err = all(c.relays, (*process).freeze)
	_, eerr := c.exec(ctx, endReader, c.config.Slot)
	err = errors.Join(err, eerr)
	for range 8 {
		_, werr := c.exec(ctx, "SELECT pg_catalog.pg_logical_emit_message(false, 'prove', "+
			"pg_catalog.repeat('x', 8 << 20))")
		_, serr := c.exec(ctx, "SELECT pg_catalog.pg_switch_wal()")
		err = errors.Join(err, werr, serr)
	}
	_, cerr := c.exec(ctx, "CHECKPOINT")
	return "", func(ctx context.Context) error {
		return errors.Join(all(c.relays, (*process).thaw), limit(ctx))
	}, errors.Join(err, cerr)
}

// transactionOpen keeps a transaction with an assigned id open.
func transactionOpen(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	conn, err := connect(ctx, c.stage.postgres)
	if err != nil {
		return "", nil, err
	}
	_, err = conn.Exec(ctx, "BEGIN; SELECT pg_current_xact_id(); "+
		"SELECT pg_catalog.pg_logical_emit_message(true, 'prove', '')")
	return "", func(ctx context.Context) error {
		_ = conn.Close(ctx) // rolls back; the server may have ended the session already
		return nil
	}, err
}

// transactionPrepared prepares a transaction with events, and finally commits it or rolls it back.
func transactionPrepared(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	a := c.truth.NewAggregate("", types[r.IntN(len(types))])
	name := fmt.Sprintf("prove-%d", a.Number)
	j := &oracle.Job{Truth: c.truth, Pad: oracle.Padding(r, 50)}
	const events = 5
	finish, result := "ROLLBACK PREPARED", oracle.No
	if r.IntN(2) == 0 {
		finish, result = "COMMIT PREPARED", oracle.Yes
	}
	err := func() error {
		tx, err := c.stage.pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after PREPARE, this has no effect
		if err := j.Insert(ctx, tx, a, events); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, fmt.Sprintf("PREPARE TRANSACTION '%s'", name))
		return err
	}()
	if err != nil {
		// If the answer was lost, the transaction may be prepared. If it is not, the statement only fails.
		_, rerr := c.exec(ctx, fmt.Sprintf("ROLLBACK PREPARED '%s'", name))
		j.End(map[bool]oracle.Outcome{true: oracle.No, false: oracle.Unknown}[rerr == nil])
		return "", nil, err
	}
	return finish, func(ctx context.Context) (err error) {
		text := fmt.Sprintf("%s '%s'", finish, name)
		for range 100 { // Postgres may be unavailable for a while
			if _, err = c.exec(ctx, text); err == nil {
				j.End(result)
				return nil
			}
			pause.For(ctx, 200*time.Millisecond)
		}
		j.End(oracle.Unknown)
		return fmt.Errorf("%s: %w", text, err)
	}, nil
}
