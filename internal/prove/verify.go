package prove

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/internal/lab/oracle"
)

// verifyWithin bounds the verification as a whole. Single steps that wait for the system have shorter limits.
const verifyWithin = 30 * time.Minute

// verify compares everything with the truth once more, after all writers have stopped and all events are settled.
func (c *campaign) verify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, verifyWithin)
	defer cancel()
	c.progress.Say("verifying")
	for _, step := range []func(ctx context.Context) error{
		c.verifyEmpty, c.verifyTable, c.verifyStreams, c.verifyUnread, c.verifyHistory, c.verifyOrders,
		c.verifyEffects, c.verifyCredits,
	} {
		if err := step(ctx); err != nil || c.breach() != nil {
			return err
		}
	}
	return nil
}

// breaks records a broken promise that the verification found.
func (c *campaign) breaks(promise string, event uuid.UUID, subject, format string, args ...any) {
	b := &oracle.Breach{Promise: promise, Subject: subject, What: fmt.Sprintf(format, args...)}
	if event != uuid.Nil {
		b.Event = event.String()
	}
	c.broke(b)
}

// until waits until cond holds. If it does not hold in time, the promise is broken.
func (c *campaign) until(
	ctx context.Context, promise, what string, cond func(ctx context.Context) (bool, error),
) error {
	began := time.Now()
	return repeat(ctx, func() (bool, error) {
		holds, err := cond(ctx)
		if err == nil && !holds && time.Since(began) > stuckAfter {
			c.breaks(promise, uuid.Nil, "", "%v after the end: %s", stuckAfter, what)
			return true, nil
		}
		return holds, err
	})
}

// verifyEmpty waits until all events are settled.
func (c *campaign) verifyEmpty(ctx context.Context) error {
	return c.until(ctx, "stuck", "the outbox is not empty", func(ctx context.Context) (bool, error) {
		var owed bool
		err := c.stage.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox_backlog)").Scan(&owed)
		return !owed, err
	})
}

// verifyTable reads from Postgres which of the events without an answer to their commit were committed. It also checks
// that Postgres has every event whose commit it confirmed.
func (c *campaign) verifyTable(ctx context.Context) error {
	there, err := c.count(ctx, "outbox")
	if err != nil {
		return err
	}
	c.truth.Each(func(r oracle.Ref, s oracle.State) {
		n := there[r]
		switch {
		case s == oracle.StateOpen:
			c.truth.End(r, 1, map[bool]oracle.Outcome{true: oracle.Yes, false: oracle.No}[n > 0])
		case s == oracle.StateCommitted && n != 1:
			c.breaks("lost", c.truth.ID(r), "", "Postgres said that it had committed the event, and has it %d times", n)
		case s == oracle.StateRolledBack && n != 0:
			c.breaks("phantom", c.truth.ID(r), "", "Postgres has an event that was rolled back")
		}
	})
	return nil
}

// verifyStreams reads the streams from their beginning.
func (c *campaign) verifyStreams(ctx context.Context) error {
	again := oracle.NewPass(c.truth)
	again.Late = true
	for _, typ := range types {
		r := c.reader(typ, typed{again, typ}, func() bool { return false })
		for {
			n, err := r.read(ctx)
			if err != nil {
				return fmt.Errorf("read %s: %w", r.stream, err)
			}
			if n == 0 || c.breach() != nil {
				break
			}
		}
	}
	missing, excused := 0, 0
	c.truth.Each(func(r oracle.Ref, s oracle.State) {
		switch {
		case s != oracle.StateCommitted || again.Is(r, oracle.FlagSeen):
		case c.pass.Is(r, oracle.FlagExcused):
			excused++
		default:
			missing++
			c.breaks("lost", c.truth.ID(r), c.truth.Aggregate(r.Aggregate).ID, "a committed event is not in its stream")
		}
	})
	n := &c.report.Counts
	c.report.mu.Lock()
	defer c.report.mu.Unlock()
	n.Found, _, _ = again.Counts()
	n.Lost, n.Expired = missing, excused
	return nil
}

// verifyUnread reads for the groups that never read: each must begin with the first entry of its stream.
func (c *campaign) verifyUnread(ctx context.Context) (err error) {
	c.unread.Range(func(stream, _ any) bool {
		name := stream.(string) //nolint:forcetypeassert // nothing else is stored
		first, rerr := c.stage.client.XRangeN(ctx, name, "-", "+", 1).Result()
		got, gerr := c.stage.client.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: groupAway, Consumer: "c", Streams: []string{name, ">"}, Count: 1, Block: -1,
		}).Result()
		switch {
		case rerr != nil:
			err = rerr
		case gerr != nil && !errors.Is(gerr, redis.Nil) && !redis.HasErrorPrefix(gerr, "NOGROUP"):
			err = gerr
		case gerr != nil || len(first) == 0 || got[0].Messages[0].ID != first[0].ID:
			c.breaks("lost", uuid.Nil, "", "group %s does not get %s from its first entry on: %v", groupAway, name,
				gerr)
		}
		return err == nil
	})
	return err
}

// verifyHistory compares the history with the truth: it must have each event once.
func (c *campaign) verifyHistory(ctx context.Context) error {
	there, err := c.count(ctx, "outbox_history")
	if err != nil {
		return err
	}
	c.truth.Each(func(r oracle.Ref, s oracle.State) {
		if n := there[r]; s == oracle.StateCommitted && n != 1 {
			c.breaks("history", c.truth.ID(r), "", "history has the event %d times", n)
		}
	})
	return nil
}

// count returns how often a table has each event of the writers.
func (c *campaign) count(ctx context.Context, table string) (map[oracle.Ref]uint8, error) {
	rows, err := c.stage.pool.Query(ctx, "SELECT id FROM "+table+" WHERE aggregate_type = ANY ($1)", types)
	if err != nil {
		return nil, err
	}
	there := map[oracle.Ref]uint8{}
	var id uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
		if r, ours := c.truth.Of(id); ours {
			there[r] = min(there[r], 254) + 1
		}
		return nil
	})
	return there, err
}

// verifyOrders compares the orders with the answers to clients, and the events with the orders.
func (c *campaign) verifyOrders(ctx context.Context) error {
	rows, err := c.stage.pool.Query(ctx, "SELECT id FROM orders WHERE user_id = $1", c.shop.user)
	if err != nil {
		return err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return err
	}
	placed := map[uuid.UUID]bool{}
	for _, id := range ids {
		placed[id] = true
	}
	var lost []uuid.UUID
	err = c.until(ctx, "lost", "orders have no event in the stream", func(context.Context) (bool, error) {
		c.orders.mu.Lock()
		defer c.orders.mu.Unlock()
		lost = slices.DeleteFunc(slices.Clone(ids), func(id uuid.UUID) bool {
			return c.orders.inStream[id] != uuid.Nil || c.orders.excused[id]
		})
		return len(lost) == 0, nil
	})
	if b := c.breach(); b != nil && len(lost) > 0 { // the story is that of the first of them
		b.Subject, b.What = lost[0].String(), fmt.Sprintf("%s: %d of %d", b.What, len(lost), len(ids))
	}
	if err != nil || c.breach() != nil {
		return err
	}
	c.orders.mu.Lock()
	defer c.orders.mu.Unlock()
	for _, id := range c.orders.keys {
		if id != uuid.Nil && !placed[id] {
			c.breaks("orders", uuid.Nil, id.String(), "a client got an order that does not exist")
		}
	}
	for id := range c.orders.inStream {
		if !placed[id] {
			c.breaks("phantom", c.orders.inStream[id], id.String(), "an event of an order that does not exist")
		}
	}
	if len(placed) > len(c.orders.keys) {
		c.breaks("orders", uuid.Nil, "", "%d keys have %d orders", len(c.orders.keys), len(placed))
	}
	c.report.Counts.Orders = len(placed)
	return nil
}

// verifyEffects waits until every order has its effects, and checks that none of them occurred twice with the inbox.
func (c *campaign) verifyEffects(ctx context.Context) error {
	var effects, distinct, delivered, reached int
	err := c.until(ctx, "effects", "orders are without their effects", func(ctx context.Context) (bool, error) {
		err := c.stage.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM prove_effect),
			(SELECT pg_catalog.count(DISTINCT event) FROM prove_effect), (SELECT count(*) FROM prove_delivery),
			(SELECT pg_catalog.count(DISTINCT event) FROM prove_delivery)`).
			Scan(&effects, &distinct, &delivered, &reached)
		return distinct >= c.report.Counts.Orders && reached >= c.report.Counts.Orders, err
	})
	if err != nil || c.breach() != nil {
		return err
	}
	if effects != distinct || distinct != c.report.Counts.Orders || reached != distinct {
		c.breaks("effects", uuid.Nil, "", "%d orders have %d effects by %d events with the inbox, and deliveries of "+
			"%d without", c.report.Counts.Orders, effects, distinct, reached)
	}
	c.report.Counts.Effects, c.report.Counts.Redelivered = effects, delivered-reached
	return nil
}

// verifyCredits compares the balances with the ledger and, unless Redis has lost data, with the answers to clients.
func (c *campaign) verifyCredits(ctx context.Context) error {
	var r *credits.Report
	err := c.until(ctx, "overspent", "the ledger is behind Redis", func(ctx context.Context) (bool, error) {
		var err error
		r, err = credits.Reconcile(ctx, c.stage.client, c.stage.pool, func(int64, int64) {})
		return err == nil && r.Pending == 0, err
	})
	if err != nil || c.breach() != nil {
		return err
	}
	if !r.Clean() {
		c.breaks("overspent", uuid.Nil, "", "balances and ledger differ: %+v %+v", r.Differences, r.Buckets)
	}
	for _, a := range c.shop.accounts {
		var balance, entries int64
		var rebuilt bool // from the ledger: Redis lost operations, even if its streams are complete
		err := c.stage.pool.QueryRow(ctx, `SELECT coalesce(pg_catalog.max(a.balance), 0),
			coalesce(pg_catalog.sum(
				CASE WHEN e.outcome <> 'OK' THEN 0 WHEN e.kind = 'add' THEN e.amount ELSE -e.amount END), 0),
			EXISTS (SELECT FROM credit_epoch WHERE bucket = $2 AND bumped_at IS NOT NULL)
			FROM credit_accounts a LEFT JOIN credit_entries e USING (user_id) WHERE user_id = $1`, a.user,
			credits.Bucket(a.user)).Scan(&balance, &entries, &rebuilt)
		if err != nil {
			return err
		}
		least, most := a.added-a.spent-a.maybeSpent, a.added+a.maybeAdded-a.spent
		switch {
		case balance != entries || balance < 0:
			c.breaks("overspent", uuid.Nil, a.user.String(), "a balance of %d, and entries that add up to %d", balance,
				entries)
		case c.report.Counts.Forgot == 0 && !rebuilt && (balance < least || balance > most):
			c.breaks("overspent", uuid.Nil, a.user.String(), "a balance of %d, and clients were answered for %d to %d",
				balance, least, most)
		}
		c.report.Counts.Credits += int(a.added + a.spent)
	}
	return nil
}
