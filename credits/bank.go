package credits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"posthaste/internal/pause"
	"posthaste/sql"
)

// Errors of Apply and Balance. After every error except ErrUnknown, the operation was not carried out.
var (
	// ErrUnknownUser means that the user has no account. The first addition creates the account.
	ErrUnknownUser = errors.New("the user has no credit account")
	// ErrReused means that the operation's id was used for another command.
	ErrReused = errors.New("the operation's id was used for another command")
	// ErrFrozen means that the account is stopped because its operations contradict the ledger.
	ErrFrozen = errors.New("the account is frozen")
	// ErrBackpressure means that too many operations of the bucket wait to be written to the ledger.
	ErrBackpressure = errors.New("too many operations wait for the ledger")
	// ErrRecovering means that Redis has lost data and the bucket has not been rebuilt from the ledger yet.
	ErrRecovering = errors.New("the balances are being rebuilt from the ledger")
	// ErrUnavailable means that Redis or, where it is needed, Postgres cannot be used.
	ErrUnavailable = errors.New("the store of balances cannot be used")
	// ErrUnknown means that the operation may have been carried out, or is not durable yet. Apply with the same id
	// returns the outcome.
	ErrUnknown = errors.New("the outcome of the operation is unknown")
	// ErrExpired means that the key is older than KeyMaxAge and the ledger does not have it.
	ErrExpired = errors.New("the key is too old and nothing was done under it")
)

const (
	// OutcomeTTL is how long Redis keeps an operation's outcome. The ledger keeps it forever.
	OutcomeTTL = 48 * time.Hour
	// mostAhead is how far the time of a key may be ahead of the local clock. Redis keeps the outcome that much longer.
	mostAhead = 24 * time.Hour
	// maxStream is how many operations of a bucket may wait for the ledger.
	maxStream = 10_000
	// patience limits the time for all attempts of one operation.
	patience = 2 * time.Second
	// checkEvery is how long the result of a check of the server's settings is valid.
	checkEvery = 5 * time.Second
	// clockSlack is how far the time of a young key may be ahead of the local clock. youngLimit is the maximum age of a
	// key for which Redis certainly still has the outcome.
	clockSlack = 5 * time.Minute
	youngLimit = OutcomeTTL - time.Hour
)

// Options of a Bank. Redis and Pool are required.
type Options struct {
	// Redis holds the balances; see NewClient. The caller closes it.
	Redis redis.UniversalClient
	// Connections are the connections of Redis. If nil, the Bank notices up to a second late that a server lacks
	// operations after a failover.
	Connections *Connections
	// Pool reaches Postgres. The caller closes it.
	Pool *sql.Pool
	// Durability is the level that every operation waits for.
	Durability Durability
	// KeyMaxAge refuses keys older than this for which the ledger has no operation. Zero means no limit.
	KeyMaxAge time.Duration
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// Bank changes and reads balances. It is safe for concurrent use.
type Bank struct {
	o         Options
	calls     *batcher
	log       *slog.Logger
	metrics   *bankMetrics
	maxStream int

	buckets [Buckets]bucket
	used    atomic.Bool
	loads   singleflight.Group
	checks  singleflight.Group
	fit     atomic.Pointer[fitness]
	owner   ownership
}

// fitness is the result of the last check of the server's settings.
type fitness struct {
	at time.Time
	// err is why operations are refused; nil if they are not.
	err error
}

// bucket is what this process knows about a bucket.
type bucket struct {
	mu sync.Mutex
	view
	// claim is the floor of an older epoch. It is set until the operations lost from that epoch have been counted.
	claim int64
}

// view is a snapshot of a bucket.
type view struct {
	// epoch is 0 until it has been read from Postgres.
	epoch int64
	// bumped is when the epoch was raised; zero for never.
	bumped time.Time
	// floor is the highest operation number that this process has received from Redis or from the ledger.
	floor int64
}

// New returns a Bank; it does no I/O.
func New(o Options) *Bank {
	log := cmp.Or(o.Logger, slog.New(slog.DiscardHandler)).With("component", "credits")
	b := &Bank{
		o: o, log: log, metrics: newBankMetrics(o.Registerer), maxStream: maxStream,
		calls: &batcher{client: o.Redis, durable: o.Durability, lanes: map[*redis.Client]*lane{}},
		owner: ownership{redis: o.Redis, pool: o.Pool},
	}
	if o.Connections != nil {
		o.Connections.bank.Store(b)
	}
	return b
}

// Run reads the marks and epochs of the ledger once a second, so that this process notices a loss of operations that
// other processes made. It returns nil when ctx ends.
func (b *Bank) Run(ctx context.Context) error {
	// Functions survive restarts of Redis. Loading them here saves the first request a round trip.
	if err := loadLibrary(ctx, b.o.Redis); err != nil {
		b.log.Debug("functions not loaded yet", "err", err)
	}
	for pause.For(ctx, time.Second) == nil {
		if b.used.Load() {
			b.refresh(ctx)
		}
	}
	return nil
}

// refresh reads the marks and epochs of the ledger.
func (b *Bank) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	rows, err := LedgerBuckets(ctx, b.o.Pool)
	if err != nil {
		b.log.Debug("marks not refreshed", "err", err)
		return
	}
	for _, r := range rows {
		b.learn(r)
	}
	if err := b.claim(ctx); err != nil {
		b.log.Debug("losses not counted yet", "err", err)
	}
}

// claim counts lost operations that only this process had seen: the process that raised the epoch did not count them.
// It queries all buckets concurrently, so that an unreachable node does not delay the other buckets.
func (b *Bank) claim(ctx context.Context) error {
	var claims errgroup.Group
	for bkt := range int16(Buckets) {
		k := &b.buckets[bkt]
		k.mu.Lock()
		epoch, floor := k.epoch, k.claim
		k.mu.Unlock()
		if floor > 0 {
			claims.Go(func() error { return b.claimIn(ctx, bkt, epoch, floor) })
		}
	}
	return claims.Wait()
}

func (b *Bank) claimIn(ctx context.Context, bkt int16, epoch, floor int64) error {
	r, err := call(ctx, b.o.Redis, fnClaim, []string{epochKey(bkt)}, epoch, floor)
	if err != nil {
		return fmt.Errorf("bucket %d: %w", bkt, err)
	}
	if r[0] == "EPOCH" { // the bucket is not open yet, or is closed again
		return nil
	}
	k := &b.buckets[bkt]
	k.mu.Lock()
	if k.claim == floor {
		k.claim = 0
	}
	k.mu.Unlock()
	if lost, _ := strconv.ParseInt(r[0], 10, 64); lost > 0 { // printed by Lua, so it parses
		b.metrics.lost.Add(float64(lost))
		b.log.Error("redis had lost operations that this process had answered", "bucket", bkt, "epoch", epoch,
			"lost_operations", lost)
	}
	return nil
}

// learn records a row of the ledger. If the epoch has risen, the old floor moves to claim until the losses are counted.
func (b *Bank) learn(r LedgerBucket) {
	k := &b.buckets[r.Bucket]
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case r.Epoch > k.epoch:
		if k.epoch > 0 {
			k.claim = max(k.claim, k.floor)
		}
		k.epoch, k.floor = r.Epoch, r.Mark
	case r.Epoch == k.epoch:
		k.floor = max(k.floor, r.Mark)
	}
	if r.BumpedAt != nil && r.Epoch == k.epoch {
		k.bumped = *r.BumpedAt
	}
}

// drop removes an epoch, and later ones, that the ledger does not have any more: Postgres was restored to an earlier
// time, and Redis is not in that epoch either.
func (b *Bank) drop(bkt int16, epoch int64) {
	k := &b.buckets[bkt]
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.epoch == epoch {
		k.view, k.claim = view{}, 0
	}
}

// told raises the floor of a bucket to a number that Redis returned in epoch.
func (b *Bank) told(bkt int16, epoch int64, n string) {
	v, err := strconv.ParseInt(n, 10, 64)
	if err != nil {
		return
	}
	k := &b.buckets[bkt]
	k.mu.Lock()
	if k.epoch == epoch {
		k.floor = max(k.floor, v)
	}
	k.mu.Unlock()
}

// view returns the snapshot of a bucket. The first call for a bucket reads Postgres.
func (b *Bank) view(ctx context.Context, bkt int16) (view, error) {
	if v := b.known(bkt); v.epoch > 0 {
		return v, nil
	}
	if err := b.ask(ctx, bkt); err != nil {
		return view{}, err
	}
	return b.known(bkt), nil
}

func (b *Bank) known(bkt int16) view {
	k := &b.buckets[bkt]
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.view
}

// ask reads a bucket's row from Postgres, and inserts the row if it is missing. Concurrent calls for one bucket share
// one query.
func (b *Bank) ask(ctx context.Context, bkt int16) error {
	_, err, _ := b.loads.Do(epochKey(bkt), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		had := b.known(bkt)
		r, err := readBucket(ctx, b.o.Pool, bkt)
		if errors.Is(err, errBucketUnused) {
			if _, err = b.o.Pool.Exec(ctx, query("epoch_add"), bkt); err == nil {
				r, err = readBucket(ctx, b.o.Pool, bkt)
			}
		}
		if err == nil {
			if r.Epoch < had.epoch {
				b.drop(bkt, had.epoch)
			}
			b.learn(r)
		}
		return nil, err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	b.used.Store(true)
	return nil
}

// check refuses a server that may evict balances, that does not support the configured durability, or whose balances
// belong to another database.
func (b *Bank) check(ctx context.Context) error {
	f := b.fit.Load()
	if f == nil || time.Since(f.at) > checkEvery {
		v, err, _ := b.checks.Do("", func() (any, error) {
			if f := b.fit.Load(); f != nil && time.Since(f.at) <= checkEvery {
				return f, nil
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
			defer cancel()
			return b.look(ctx)
		})
		if err != nil {
			return fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		f = v.(*fitness)
	}
	return f.err
}

// look checks the settings of every primary and the owner of the balances. A node that does not answer carries out no
// operations, so look ignores it as long as another node answers.
func (b *Bank) look(ctx context.Context) (*fitness, error) {
	f := &fitness{at: time.Now()}
	var mu sync.Mutex
	answered := false
	err := eachPrimary(ctx, b.o.Redis, func(ctx context.Context, c *redis.Client) error {
		reason, err := b.o.Durability.unsafeReason(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		if reason != "" {
			f.err = fmt.Errorf("%w: %s", ErrUnavailable, reason)
		}
		if err == nil {
			answered = true
		}
		return err
	})
	if answered {
		err = nil
	}
	if err == nil && f.err == nil {
		if err = b.owner.check(ctx, true); errors.Is(err, ErrForeign) {
			f.err, err = err, nil
		}
	}
	if err != nil {
		return nil, err
	}
	if old := b.fit.Swap(f); f.err != nil && (old == nil || fmt.Sprint(old.err) != f.err.Error()) {
		b.log.Error("redis is not fit for balances: operations are refused", "reason", f.err)
	}
	return f, nil
}

// Apply carries out an operation, or returns its outcome if it was carried out before. A refusal (Insufficient,
// Overflow) is a Result, not an error. Errors: ErrUnknownUser, ErrReused, ErrFrozen, ErrBackpressure, ErrRecovering,
// ErrUnavailable, ErrUnknown, ErrExpired. Only after ErrUnknown may the operation have been carried out.
func (b *Bank) Apply(ctx context.Context, op Op) (Result, error) {
	// Every step has its own time limit, so that the common case, a single step, needs no timer.
	res, err := b.apply(ctx, &op)
	b.metrics.count(&res, err)
	return res, err
}

// errCorrupt means that a key of the operation does not have the expected value.
var errCorrupt = errors.New("redis holds something else under the key of an account")

// Undone reports that an operation is neither in the ledger nor in the stream of its bucket. If it returns an error,
// nothing is known about the operation.
func (b *Bank) Undone(ctx context.Context, user, op uuid.UUID) (bool, error) {
	// Undone reads the stream before the ledger: an entry leaves the stream only after it is in the ledger.
	id, found := any(op.String()), false
	err := eachEntry(ctx, b.o.Redis, Bucket(user), func(m redis.XMessage) { found = found || m.Values["o"] == id })
	if err != nil || found {
		return false, err
	}
	_, err = EntryByOp(ctx, b.o.Pool, user, op)
	if errors.Is(err, ErrEntryNotFound) {
		return true, nil
	}
	return false, err
}

// eachEntry calls f for each entry of a bucket's stream.
func eachEntry(ctx context.Context, c redis.UniversalClient, bkt int16, f func(m redis.XMessage)) error {
	const page = 1000
	for from := "-"; ; {
		list, err := c.XRangeN(ctx, streamKey(bkt), from, "+", page).Result()
		if err != nil {
			return fmt.Errorf("read the stream of bucket %d: %w", bkt, err)
		}
		for _, m := range list {
			f(m)
			from = after(m.ID)
		}
		if len(list) < page {
			return nil
		}
	}
}

// reopen handles an EPOCH reply: another process has raised the epoch, the bucket was never used, or it must be
// rebuilt. It always returns an error: a retryable ErrRecovering, or another one.
func (b *Bank) reopen(ctx context.Context, bkt int16, had view) error {
	if err := b.ask(ctx, bkt); err != nil {
		return err
	}
	var err error
	if now := b.known(bkt); now.epoch == had.epoch && now.floor == 0 && now.bumped.IsZero() {
		// Neither this process nor the ledger knows of an operation in this bucket. If Redis lost all of them before
		// any reached the ledger, an empty bucket still agrees with the ledger.
		_, err = call(ctx, b.o.Redis, fnInit, []string{epochKey(bkt), streamKey(bkt)}, now.epoch)
	} else {
		_, err = call(ctx, b.o.Redis, fnCheck, []string{epochKey(bkt)}, now.epoch, now.floor)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return retryable{ErrRecovering}
}
