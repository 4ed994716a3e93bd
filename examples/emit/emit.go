// Package emit is an example of a service that publishes its own changes: accounts with deposits, each published in the
// order in which they happened. It depends neither on Redis nor on the relay; it inserts a row.
package emit

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// Deposit is the body of the event deposit.made, on the stream of aggregate type account.
type Deposit struct {
	Account string `json:"account"`
	Amount  int64  `json:"amount"`
	// Balance is the balance after the deposit.
	Balance int64 `json:"balance"`
}

// Setup creates the table.
func Setup(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx,
		"CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, balance bigint NOT NULL DEFAULT 0 CHECK (balance "+
			"<= 1000))")
	return err
}

// Pay adds amount to the account and writes the event, both or neither. It returns the event's id. pool finds
// posthaste's tables through its search path; sql.PoolConfig configures such a pool.
func Pay(ctx context.Context, pool *pgxpool.Pool, account string, amount int64) (id uuid.UUID, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		d := Deposit{Account: account, Amount: amount}
		// The upsert locks the account's row before the event is written. This lock keeps the account's events in
		// order: the next deposit waits here until this one has committed.
		err := tx.QueryRow(ctx, `INSERT INTO account (name, balance) VALUES ($1, $2)
			ON CONFLICT (name) DO UPDATE SET balance = account.balance + excluded.balance RETURNING balance`, account,
			amount).Scan(&d.Balance)
		if err != nil {
			return fmt.Errorf("book the deposit: %w", err)
		}
		body, err := json.Marshal(d)
		if err != nil {
			return fmt.Errorf("encode the event: %w", err)
		}
		ids, err := outbox.Insert(ctx, tx, outbox.Event{
			AggregateType: "account", AggregateID: account,
			Type: "deposit.made", Payload: body,
		})
		if err == nil {
			id = ids[0]
		}
		return err
	})
	return id, err
}
