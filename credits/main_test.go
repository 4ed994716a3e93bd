package credits

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) {
	logging.Disable() // go-redis writes every failed dial to standard error
	if url := os.Getenv(childRedis); url != "" {
		os.Exit(child(url, os.Getenv(childPostgres), os.Getenv(childUser)))
	}
	os.Exit(testenv.Main(m))
}

// world is a bank and a sync on their own servers.
type world struct {
	tb    testing.TB
	db    *testenv.Database
	redis *testenv.RedisServer
	bank  *Bank
	sync  *Sync
}

func newWorld(tb testing.TB, config ...string) *world {
	tb.Helper()
	w := &world{tb: tb, db: testenv.Postgres(tb), redis: testenv.Redis(tb, config...)}
	w.bank = w.newBank()
	w.sync = w.newSync()
	return w
}

// client has the settings of NewClient, except for longer timeouts: a machine that pauses for a second must not fail a
// test. Tests of the timeouts use proxied.
func (w *world) client(url string) *redis.Client {
	w.tb.Helper()
	c, _ := w.connected(url)
	return c
}

// connected returns a client and its connections.
func (w *world) connected(url string) (*redis.Client, *Connections) {
	w.tb.Helper()
	c, connections, err := patientClient(url)
	must(w.tb, err)
	w.tb.Cleanup(func() { _ = c.Close() })
	return c, connections
}

func patientClient(url string) (*redis.Client, *Connections, error) {
	c, connections, err := NewClient(url)
	if err != nil {
		return nil, nil, err
	}
	o := again(c)
	o.Dialer = nil // its timeout is that of c
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = 30*time.Second, 30*time.Second, 30*time.Second
	return redis.NewClient(o), connections, c.Close()
}

// again returns c's options for another client.
func again(c redis.UniversalClient) *redis.Options {
	o := *c.(*redis.Client).Options()
	o.MaxRetries = -1 // c stores -1 as 0, and 0 would mean three retries
	return &o
}

// newBank returns a bank as in another process on the same servers.
func (w *world) newBank(edit ...func(*Options)) *Bank {
	w.tb.Helper()
	o := Options{Pool: w.db.Pool, Logger: testenv.Logger(w.tb)}
	for _, f := range edit {
		f(&o)
	}
	if o.Redis == nil {
		o.Redis, o.Connections = w.connected(w.redis.URL())
	}
	return New(o)
}

// proxied returns a bank that reaches Redis through a proxy, with the timeouts of NewClient. The bank has deducted 1
// from user, so that it is connected. edit may change how it dials.
func (w *world) proxied(user uuid.UUID, edit ...func(*redis.Options, *testenv.Link)) (*Bank, *testenv.Link) {
	w.tb.Helper()
	proxy := testenv.NewLink(w.tb, w.redis.Addr())
	c, connections, err := NewClient("redis://" + proxy.Addr() + "/0")
	must(w.tb, err)
	for _, f := range edit {
		own := again(c)
		f(own, proxy)
		_ = c.Close()
		c = redis.NewClient(own)
	}
	w.tb.Cleanup(func() { _ = c.Close() })
	b := w.newBank(func(o *Options) { o.Redis, o.Connections = c, connections })
	w.insist(b, newOp(user, Deduct, 1))
	return b, proxy
}

func (w *world) newSync() *Sync {
	return NewSync(SyncOptions{Redis: w.client(w.redis.URL()), Pool: w.db.Pool, Logger: testenv.Logger(w.tb)})
}

// run runs the sync in the background until the test ends.
func (w *world) run() {
	testenv.Background(w.tb, w.sync.Run)
}

// settle runs rounds until the streams are empty.
func (w *world) settle() {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error {
		w.sync.looked = time.Time{}
		n, err := w.sync.round(context.Background())
		if err != nil || n > 0 {
			return errors.Join(err, errors.New("there may be more"))
		}
		// Another sync may hold the buckets, and then this sync must wait for it.
		busy, err := w.sync.waiting(context.Background())
		if err == nil && len(busy) > 0 {
			err = errors.New("there is more")
		}
		return err
	})
}

func newOp(user uuid.UUID, kind Kind, amount int64) Op {
	id := OpID(uuid.New())
	op := Op{User: user, ID: id, Kind: kind, Amount: amount, MintedAt: time.Now()}
	copy(op.Fingerprint[1:], id[:])
	return op
}

// must applies an operation and requires the outcome.
func (w *world) must(op Op, want Outcome) Result {
	w.tb.Helper()
	r, err := w.bank.Apply(w.tb.Context(), op)
	if err != nil || r.Outcome != want {
		w.tb.Fatalf("%s %d: got %v, %v, want %s", op.Kind, op.Amount, r.Outcome, err, want)
	}
	return r
}

// replayed is must for an operation that was carried out, or refused, before.
func (w *world) replayed(op Op, want Outcome, balance int64) {
	w.tb.Helper()
	if r := w.must(op, want); !r.Replayed || r.Balance != balance {
		w.tb.Errorf("%s %d: got %+v, want a replay with balance %d", op.Kind, op.Amount, r, balance)
	}
}

// insist repeats an operation in a process until it has an outcome, as a client would.
func (w *world) insist(b *Bank, op Op) (r Result) {
	w.tb.Helper()
	testenv.Eventually(w.tb, 30*time.Second, func() (err error) {
		r, err = b.Apply(w.tb.Context(), op)
		return err
	})
	return r
}

// durable is must for a bank that waits for disks or replicas. The wait times out after half a second, which can happen
// on a busy machine.
func (w *world) durable(op Op, want Outcome) Result {
	w.tb.Helper()
	r := w.insist(w.bank, op)
	if r.Outcome != want {
		w.tb.Fatalf("%s %d: got %s, want %s", op.Kind, op.Amount, r.Outcome, want)
	}
	return r
}

// refused applies an operation and requires the error.
func (w *world) refused(op Op, want error) {
	w.tb.Helper()
	w.refusedBy(w.bank, op, want)
}

// refusedBy is refused in another process.
func (w *world) refusedBy(b *Bank, op Op, want error) {
	w.tb.Helper()
	if r, err := b.Apply(w.tb.Context(), op); !errors.Is(err, want) {
		w.tb.Errorf("%s %d: got %+v, %v, want %v", op.Kind, op.Amount, r, err, want)
	}
}

// closedFor waits until a process finds the user's bucket closed. The process must not have done anything before.
func (w *world) closedFor(b *Bank, user uuid.UUID) {
	w.tb.Helper()
	testenv.Eventually(w.tb, 20*time.Second, func() error { // the first attempts use the old connections
		r, err := b.Apply(w.tb.Context(), newOp(user, Deduct, 1))
		if err == nil {
			w.tb.Errorf("an operation on the stale balance: %+v", r)
		} else if !errors.Is(err, ErrRecovering) {
			return err
		}
		return nil
	})
}

// neighbour returns a second user of the same bucket.
func neighbour(user uuid.UUID) uuid.UUID {
	for {
		if other := uuid.New(); Bucket(other) == Bucket(user) {
			return other
		}
	}
}

// crash runs a sync that crashes at a point.
func (w *world) crash(point string) {
	w.tb.Helper()
	crashed, errCrash := w.newSync(), errors.New("crashed")
	crashed.failpoint = func(name string) error {
		if name == point {
			return errCrash
		}
		return nil
	}
	_, err := crashed.round(w.tb.Context())
	testenv.ErrorIs(w.tb, "the crash", err, errCrash)
}

// unsynced returns how many entries are in the stream of a user's bucket.
func (w *world) unsynced(user uuid.UUID) int64 {
	w.tb.Helper()
	return w.redis.Client.XLen(w.tb.Context(), streamKey(Bucket(user))).Val()
}

func (w *world) funded(amount int64) uuid.UUID {
	w.tb.Helper()
	user := uuid.New()
	w.must(newOp(user, Add, amount), OK)
	return user
}

// account returns the account's hash in Redis.
func (w *world) account(user uuid.UUID) map[string]string {
	w.tb.Helper()
	m, err := w.redis.Client.HGetAll(w.tb.Context(), accountKey(user)).Result()
	must(w.tb, err)
	return m
}

func (w *world) ledger(user uuid.UUID) LedgerAccount {
	w.tb.Helper()
	a, _, err := accountAt(w.tb.Context(), w.db.Pool, user)
	must(w.tb, err)
	if a == nil {
		return LedgerAccount{}
	}
	return *a
}

// inStep checks that the sum of the entries, the ledger's balance and the balance in Redis are equal, that numbers have
// no gaps, and that every success has an event.
func (w *world) inStep(user uuid.UUID, balance int64) {
	w.tb.Helper()
	w.settle()
	type row struct{ sum, balance, lastSeq, entries, events, successes, lowest int64 }
	var r row
	err := w.db.Pool.QueryRow(w.tb.Context(), `SELECT
		(SELECT coalesce(sum(CASE WHEN outcome <> 'OK' THEN 0 WHEN kind = 'add' THEN amount ELSE -amount END), 0)
			FROM credit_entries WHERE user_id = $1),
		a.balance, a.last_seq, (SELECT count(*) FROM credit_entries WHERE user_id = $1),
		(SELECT count(*) FROM outbox o JOIN credit_entries e ON e.op_id = o.id AND o.aggregate_id = $1::text
			AND o.aggregate_type = 'credits' AND o.event_type = 'credits.' || e.kind || 'ed'
			AND (o.payload->>'balance')::bigint = e.balance_after WHERE e.user_id = $1),
		(SELECT count(*) FROM credit_entries WHERE user_id = $1 AND outcome = 'OK'),
		(SELECT min(balance_after) FROM credit_entries WHERE user_id = $1)
		FROM credit_accounts a WHERE user_id = $1`, user).
		Scan(&r.sum, &r.balance, &r.lastSeq, &r.entries, &r.events, &r.successes, &r.lowest)
	must(w.tb, err)
	if r.sum != balance || r.balance != balance || r.entries != r.lastSeq || r.events != r.successes || r.lowest < 0 {
		w.tb.Errorf("ledger %+v, want balance %d", r, balance)
	}
	b, err := w.bank.Balance(w.tb.Context(), user)
	if err != nil || b.Balance != balance || b.Seq != r.lastSeq || b.SyncedSeq != b.Seq {
		w.tb.Errorf("balance in redis %+v, %v, want %d at %d", b, err, balance, r.lastSeq)
	}
}

func (w *world) flush() {
	w.tb.Helper()
	must(w.tb, w.redis.Client.FlushAll(w.tb.Context()).Err())
}

func outcomeKey(user, op uuid.UUID) string { return outcomeKeyIn(Bucket(user), user, op) }

var functionQuery = redis.FunctionListQuery{LibraryNamePattern: "posthaste_credits_v1"}

// reading is the value of a counter or a gauge.
func reading(c prometheus.Metric) int64 {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		panic(err)
	}
	return int64(m.GetCounter().GetValue() + m.GetGauge().GetValue())
}

var must = testenv.Must

func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	testenv.Postgres(t).PrepareAll(t, "queries")
}
