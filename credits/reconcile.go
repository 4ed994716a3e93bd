package credits

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
	"posthaste/sql"
)

// Causes of a Difference. Operations that wait for the ledger and accounts that are not in Redis are normal and not
// differences.
const (
	causeSum     = "ledger_sum"
	causeGap     = "ledger_gap"
	causeFrozen  = "frozen"
	causeBehind  = "redis_behind"
	causeBalance = "redis_balance"
	causeStream  = "stream_incomplete"
	causeUnknown = "unknown_to_ledger"
)

// Difference is an account whose three balances do not agree, and why.
type Difference struct {
	UserID uuid.UUID `json:"user_id"`
	Cause  string    `json:"cause"`
	// Explanation is a text for operators.
	Explanation string `json:"explanation"`
	// Entries is the sum of the entries, Ledger and Redis are the two balances, Pending is the sum of the entries in
	// the stream.
	Entries int64  `json:"entries"`
	Ledger  int64  `json:"ledger"`
	Redis   *int64 `json:"redis"`
	Pending int64  `json:"pending"`
}

// Unbalanced is a bucket whose accounts do not add up to its counter-account. The cause is that accounts or balances
// were changed or deleted by hand.
type Unbalanced struct {
	Bucket int16 `json:"bucket"`
	// Issued is the counter-account, Accounts is the sum of the accounts' balances.
	Issued   int64 `json:"issued"`
	Accounts int64 `json:"accounts"`
	// Cause is counter_account.
	Cause string `json:"cause"`
}

// Report is the result of a reconciliation.
type Report struct {
	// Accounts is the number of accounts examined. Cached of them are in Redis. Pending of those have operations that
	// are not yet in the ledger and that explain the whole difference.
	Accounts    int          `json:"accounts"`
	Cached      int          `json:"cached"`
	Pending     int          `json:"pending"`
	Total       int64        `json:"total"`
	Differences []Difference `json:"differences"`
	// Buckets are the buckets whose accounts and counter-account differ.
	Buckets []Unbalanced `json:"buckets"`
}

// Clean reports whether there are no differences.
func (r *Report) Clean() bool { return len(r.Differences) == 0 && len(r.Buckets) == 0 }

const (
	reconcilePage = 500
	// An account that changes during the comparison is compared again.
	reconcileTries = 5
	reconcilePause = 100 * time.Millisecond
)

// Reconcile compares, for every account, the sum of the entries, the ledger's balance and the balance in Redis. It
// changes nothing and may run while balances change. If progress is not nil, it is called after each page with the
// number of accounts examined and their approximate total.
func Reconcile(ctx context.Context, c redis.UniversalClient, pool *sql.Pool,
	progress func(done, about int64),
) (*Report, error) {
	r := reconciliation{
		redis: c, pool: pool, report: &Report{Differences: []Difference{}, Buckets: []Unbalanced{}},
		ledger: map[uuid.UUID]bool{},
	}
	var about int64
	if err := pool.QueryRow(ctx, query("accounts_count")).Scan(&about); err != nil {
		return nil, fmt.Errorf("count the accounts: %w", err)
	}
	for after := uuid.Nil; ; {
		page, err := ledgerBalances(ctx, pool, after, reconcilePage, nil)
		if err != nil {
			return nil, err
		}
		if len(page) == 0 {
			break
		}
		if err := r.page(ctx, page); err != nil {
			return nil, err
		}
		after = page[len(page)-1].UserID
		if done := int64(r.report.Accounts); progress != nil {
			progress(done, max(about, done))
		}
	}
	buckets, err := unbalancedBuckets(ctx, pool)
	if err != nil {
		return nil, err
	}
	r.report.Buckets = append(r.report.Buckets, buckets...)
	return r.report, r.strangers(ctx)
}

type reconciliation struct {
	redis  redis.UniversalClient
	pool   *sql.Pool
	report *Report
	// ledger has the users found in the ledger.
	ledger map[uuid.UUID]bool
}

// page compares a page of accounts.
func (r *reconciliation) page(ctx context.Context, page []ledgerBalance) error {
	cached, err := r.cached(ctx, page)
	if err != nil {
		return err
	}
	for i := range page {
		b := &page[i]
		r.report.Accounts++
		r.report.Total += b.Balance
		r.ledger[b.UserID] = true
		d, pending, err := r.compare(ctx, b, cached[i])
		if err != nil {
			return err
		}
		if cached[i].there {
			r.report.Cached++
		}
		if d != nil {
			r.report.Differences = append(r.report.Differences, *d)
		} else if pending {
			r.report.Pending++
		}
	}
	return nil
}

// compare is look. It reads an account with a difference again a few times, because it may be changing.
func (r *reconciliation) compare(
	ctx context.Context, b *ledgerBalance, c cachedAccount,
) (d *Difference, pending bool, err error) {
	d, pending, err = r.look(ctx, b, c)
	for try := 1; err == nil && d != nil && try < reconcileTries; try++ {
		if err = pause.For(ctx, reconcilePause); err != nil {
			break
		}
		if c, err = r.read(ctx, b); err == nil {
			d, pending, err = r.look(ctx, b, c)
		}
	}
	return d, pending, err
}

// read reads an account from Postgres and Redis. It leaves b unchanged if the ledger does not have the account.
func (r *reconciliation) read(ctx context.Context, b *ledgerBalance) (cachedAccount, error) {
	page, err := ledgerBalances(ctx, r.pool, uuid.Nil, 1, []uuid.UUID{b.UserID})
	if err != nil {
		return cachedAccount{}, err
	}
	if len(page) == 1 {
		*b = page[0]
	}
	cached, err := r.cached(ctx, []ledgerBalance{*b})
	if err != nil {
		return cachedAccount{}, err
	}
	return cached[0], nil
}

// cachedAccount is an account in Redis.
type cachedAccount struct {
	there        bool
	balance, seq int64
	// foreign is set if the key has another type.
	foreign bool
}

func (r *reconciliation) cached(ctx context.Context, page []ledgerBalance) ([]cachedAccount, error) {
	epochs, err := LedgerBuckets(ctx, r.pool)
	if err != nil {
		return nil, err
	}
	current := map[int16]string{}
	for _, e := range epochs {
		current[e.Bucket] = strconv.FormatInt(e.Epoch, 10)
	}
	cmds := make([]*redis.SliceCmd, len(page))
	_, _ = r.redis.Pipelined(ctx, func(p redis.Pipeliner) error { // each command has its own error
		for i := range page {
			cmds[i] = p.HMGet(ctx, accountKey(page[i].UserID), "b", "q", "e")
		}
		return nil
	})
	out := make([]cachedAccount, len(page))
	for i := range page {
		v, err := cmds[i].Result()
		if wrongType(err) {
			out[i].foreign = true
			continue
		}
		if err != nil || len(v) != 3 {
			return nil, fmt.Errorf("read balances from Redis: %w", err)
		}
		if v[2] != any(current[Bucket(page[i].UserID)]) {
			continue // absent, or from an older epoch
		}
		out[i].there = true
		out[i].balance, out[i].seq = number(v[0]), number(v[1])
	}
	return out, nil
}

// number parses a field of a hash. It returns -1 if the field is not a number.
func number(v any) int64 {
	s, _ := v.(string)
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// look explains the difference of one account; it returns nil if everything agrees. pending is set if the balances
// agree once the entries in the stream are included.
func (r *reconciliation) look(ctx context.Context, b *ledgerBalance,
	c cachedAccount,
) (d *Difference, pending bool, err error) {
	diff := func(cause, format string, args ...any) *Difference {
		d := &Difference{
			UserID: b.UserID, Cause: cause, Explanation: fmt.Sprintf(format, args...), Entries: b.Sum,
			Ledger: b.Balance,
		}
		if c.there {
			d.Redis = &c.balance
		}
		return d
	}
	switch {
	case b.Sum != b.Balance || (b.Entries > 0 && b.LastBalance != b.Balance):
		d = diff(causeSum, "the entries add up to %d, the last one says %d, the account %d: the ledger was changed by "+
			"hand", b.Sum, b.LastBalance, b.Balance)
	case b.Entries != b.LastSeq:
		d = diff(causeGap, "%d entries, but the last one has number %d: entries were deleted", b.Entries, b.LastSeq)
	case b.Frozen != "":
		d = diff(causeFrozen, "frozen for %s; %d operations are in quarantine", b.Frozen, b.Quarantined)
	case c.foreign:
		d = diff(causeBalance, "the account's key in Redis has another type: it was made by hand")
	case !c.there, c.seq == b.LastSeq && c.balance == b.Balance:
	case c.seq < b.LastSeq:
		d = diff(causeBehind, "Redis is at operation %d, the ledger at %d: Redis went back in time", c.seq, b.LastSeq)
	case c.seq == b.LastSeq:
		d = diff(causeBalance, "at the same operation %d: the balance in Redis was changed by hand", c.seq)
	default:
		var n, sum int64
		if n, sum, pending, err = r.ahead(ctx, b, c); err == nil && !pending {
			d = diff(causeStream, "Redis is %d operations ahead; the stream has %d of them, which add up to %d",
				c.seq-b.LastSeq, n, sum)
			d.Pending = sum
		}
	}
	return d, pending, err
}

// ahead returns the number and sum of the operations in the stream by which Redis is ahead of the ledger, and whether
// they explain the whole difference.
func (r *reconciliation) ahead(ctx context.Context, b *ledgerBalance, c cachedAccount) (
	n, sum int64, all bool, err error,
) {
	list, err := r.waiting(ctx, b.UserID)
	if err != nil {
		return 0, 0, false, err
	}
	n, sum = between(list, b.LastSeq, c.seq)
	if n == c.seq-b.LastSeq && b.Balance+sum == c.balance {
		return n, sum, true, nil
	}
	// Entries that have left the stream since the ledger was read are in the ledger now.
	now, _, err := accountAt(ctx, r.pool, b.UserID)
	if err == nil && now != nil && now.LastSeq > b.LastSeq && now.LastSeq <= c.seq {
		rest, by := between(list, now.LastSeq, c.seq)
		all = rest == c.seq-now.LastSeq && now.Balance+by == c.balance
	}
	return n, sum, all, err
}

// change is an operation that waits for the ledger: its number, and its effect on the balance.
type change struct{ seq, by int64 }

// between returns the number and sum of the operations after number from, up to and including number to.
func between(list []change, from, to int64) (n, sum int64) {
	for _, c := range list {
		if c.seq > from && c.seq <= to {
			n++
			sum += c.by
		}
	}
	return n, sum
}

// waiting returns a user's operations in the stream.
func (r *reconciliation) waiting(ctx context.Context, user uuid.UUID) ([]change, error) {
	bkt := Bucket(user)
	var out []change
	err := eachEntry(ctx, r.redis, bkt, func(m redis.XMessage) {
		e, err := parseEntry(bkt, m.ID, m.Values)
		if err != nil || e.UserID != user {
			return
		}
		c := change{seq: e.Seq}
		switch {
		case e.Outcome != string(OK):
		case e.Kind == string(Add):
			c.by = e.Amount
		default:
			c.by = -e.Amount
		}
		out = append(out, c)
	})
	if wrongType(err) {
		err = nil // the key was replaced by hand, and the entries are lost
	}
	return out, err
}

// strangers finds accounts in Redis that are not in the ledger. They must be new, with their operations in the stream.
func (r *reconciliation) strangers(ctx context.Context) error {
	return eachPrimary(ctx, r.redis, func(ctx context.Context, c *redis.Client) error {
		it := c.Scan(ctx, 0, "{cr:*}:a:*", 1000).Iterator()
		for it.Next(ctx) {
			key := it.Val()
			user, err := uuid.Parse(key[strings.LastIndexByte(key, ':')+1:])
			if err != nil || r.ledger[user] {
				continue
			}
			r.ledger[user] = true // a scan may return a key twice
			if err := r.stranger(ctx, user); err != nil {
				return err
			}
		}
		if err := it.Err(); err != nil {
			return fmt.Errorf("look for accounts in Redis: %w", err)
		}
		return nil
	})
}

func (r *reconciliation) stranger(ctx context.Context, user uuid.UUID) error {
	b := ledgerBalance{LedgerAccount: LedgerAccount{UserID: user}}
	cached, err := r.read(ctx, &b)
	if err != nil {
		return err
	}
	d, pending, err := r.compare(ctx, &b, cached)
	if err != nil {
		return err
	}
	switch {
	case d != nil:
		if b.LastSeq == 0 {
			d.Cause = causeUnknown
		}
		r.report.Differences = append(r.report.Differences, *d)
	case pending || b.LastSeq > 0:
		r.report.Accounts++
		r.report.Cached++
		if pending {
			r.report.Pending++
		}
	}
	return nil
}
