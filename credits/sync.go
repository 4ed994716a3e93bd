package credits

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/outage"
	"posthaste/internal/pause"
	"posthaste/sql"
)

const (
	// batchEntries and batchTotal limit the entries of one bucket, and of all buckets, in one transaction.
	batchEntries = 500
	batchTotal   = 4000
	// roundTimeout limits one round: two round trips to Redis and a transaction.
	roundTimeout = 8 * time.Second
	// The pause between rounds grows while there is no work.
	idleLeast, idleMost = 10 * time.Millisecond, 250 * time.Millisecond
	// lookEvery is how often the buckets' epochs are compared with the ledger's.
	lookEvery = time.Second
	// driftEvery is how often the accounts and counter-accounts of the ledger are compared, which reads every account.
	driftEvery   = 15 * time.Minute
	driftTimeout = time.Minute
)

// SyncOptions are the options of a Sync. Redis and Pool are required.
type SyncOptions struct {
	// Redis holds the balances; see NewClient. The caller closes it.
	Redis redis.UniversalClient
	// Pool reaches Postgres. The caller closes it.
	Pool *sql.Pool
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// Sync writes the operations of all buckets to the ledger. Any number of Syncs may run, in any number of processes. The
// one that has locked a bucket's row in Postgres works on the bucket's stream.
type Sync struct {
	o       SyncOptions
	log     *slog.Logger
	metrics *syncMetrics
	owner   ownership
	// evicted is read before each scan. Owned by Run.
	evicted evictions
	// rows are the buckets in use at the last scan. Owned by Run.
	rows   []LedgerBucket
	looked time.Time
	// seen is when the streams were last read. Owned by Run.
	seen time.Time
	// stuck is the reason for each bucket that cannot be rebuilt. Owned by Run.
	stuck map[int16]string
	// aside has the buckets whose node did not execute a command, with the error. Rounds skip them until a probe, which
	// runs concurrently with the rounds, gets an answer. Owned by Run.
	aside   map[int16]error
	probing bool
	probed  chan []int16
	probes  sync.WaitGroup
	// balanced is when the accounts and counter-accounts were last compared.
	balanced time.Time
	// failpoint does nothing outside tests. Its error ends the round at that point.
	failpoint func(name string) error
}

// NewSync returns a Sync; it does no I/O.
func NewSync(o SyncOptions) *Sync {
	log := cmp.Or(o.Logger, slog.New(slog.DiscardHandler)).With("component", "credits")
	return &Sync{
		o: o, log: log, metrics: newSyncMetrics(o.Registerer),
		owner: ownership{redis: o.Redis, pool: o.Pool}, stuck: map[int16]string{}, aside: map[int16]error{},
		probed: make(chan []int16, 1), failpoint: func(string) error { return nil }, seen: time.Now(),
	}
}

// Run works until ctx ends, and then returns nil. If a server is down, Run retries; if a node of a cluster is down,
// only the buckets of that node wait.
func (s *Sync) Run(ctx context.Context) error {
	defer s.probes.Wait()
	wait := idleLeast
	var failing outage.Run
	for ctx.Err() == nil {
		n, err := s.round(ctx)
		if ctx.Err() == nil {
			s.say(&failing, err)
		}
		switch {
		case err != nil:
			wait = min(max(2*wait, idleLeast), 2*time.Second)
		case n > 0:
			wait = 0
		default:
			wait = min(max(2*wait, idleLeast), idleMost)
		}
		if err == nil && len(s.rows) > 0 && time.Since(s.balanced) >= driftEvery {
			s.balanced = time.Now()
			s.compare(ctx)
		}
		if len(s.rows) == 0 {
			wait = max(wait, lookEvery) // no bucket is in use
		}
		if wait > 0 && pause.Tick(ctx, wait) != nil {
			break
		}
	}
	return nil
}

// say logs the result of a round, and the buckets that it skipped.
func (s *Sync) say(failing *outage.Run, err error) {
	if err == nil && len(s.aside) > 0 {
		first := slices.Min(slices.Collect(maps.Keys(s.aside)))
		err = fmt.Errorf("%d of %d buckets: %w", len(s.aside), len(s.rows), s.aside[first])
	}
	if err == nil {
		if attrs, say := failing.Over(); say {
			s.log.Info("credits are taken into the ledger again", attrs...)
		}
		return
	}
	if attrs, say := failing.Failed(err); say {
		s.log.Warn("credits are not taken into the ledger, retrying", attrs...)
	}
}

// compare logs the buckets whose accounts and counter-account differ, and sets the metric of the difference.
func (s *Sync) compare(ctx context.Context) {
	work, cancel := context.WithTimeout(ctx, driftTimeout)
	defer cancel()
	list, err := unbalancedBuckets(work, s.o.Pool)
	if err != nil {
		if ctx.Err() == nil {
			s.log.Warn("the two sides of the ledger were not compared: the drift is not known", "err", err)
		}
		return
	}
	drift := int64(0)
	for _, b := range list {
		drift += max(b.Issued-b.Accounts, b.Accounts-b.Issued)
		s.log.Error("the accounts of a bucket differ from its counter-account", "bucket", b.Bucket, "accounts",
			b.Accounts, "issued", b.Issued)
	}
	s.metrics.drift.Set(float64(drift))
}

// round processes every bucket once and returns how many entries it wrote to the ledger. Buckets that are set aside do
// not make it fail.
func (s *Sync) round(ctx context.Context) (int, error) {
	s.probe(ctx)
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	if time.Since(s.looked) >= lookEvery {
		// Only Redis knows how many operations wait. Reading that before Postgres lets the lag metric rise even while
		// Postgres does not answer.
		if _, err := s.waiting(ctx); err != nil {
			return 0, err
		}
		rows, err := LedgerBuckets(ctx, s.o.Pool)
		if err != nil {
			return 0, err
		}
		s.rows = rows
		if len(rows) > 0 { // a database that does not use credits does not claim the balances
			if err := s.owner.check(ctx, false); err != nil {
				return 0, err
			}
			s.evicted.read(ctx, s.o.Redis)
		}
		if err := s.rebuildLost(ctx); err != nil {
			return 0, err
		}
		s.looked = time.Now()
	}
	if len(s.rows) == 0 {
		return 0, nil
	}
	busy, err := s.waiting(ctx)
	if err != nil || len(busy) == 0 {
		return 0, err
	}
	return s.apply(ctx, busy)
}

// ask runs the commands that add queues for each of n buckets, in one pipeline. It returns for each bucket the first
// error. A key of the wrong type is not an error here: it only affects its own bucket, until an operator removes it.
func (s *Sync) ask(ctx context.Context, n int, add func(p redis.Pipeliner, i int)) []error {
	p := s.o.Redis.Pipeline()
	ends := make([]int, n)
	for i := range n {
		add(p, i)
		ends[i] = p.Len()
	}
	cmds, _ := p.Exec(ctx) // each command has its own error
	errs := make([]error, n)
	from := 0
	for i, end := range ends {
		for _, c := range cmds[from:end] {
			if err := c.Err(); err != nil && !wrongType(err) {
				errs[i] = err
				break
			}
		}
		from = end
	}
	return errs
}

// setAside sets aside the buckets with an error. If all of them have one, either the server is down or all the work is
// on one node. Then setAside returns the error, and no bucket is set aside.
func (s *Sync) setAside(buckets []int16, errs []error) error {
	if len(errs) > 0 && !slices.Contains(errs, nil) {
		return errs[0]
	}
	for i, err := range errs {
		if err != nil {
			s.aside[buckets[i]] = err
		}
	}
	return nil
}

// probe returns buckets to the rounds when their nodes answer again. About once a second, it queries the buckets that
// are set aside. The query runs concurrently with the rounds, so that an unresponsive node does not delay them.
func (s *Sync) probe(ctx context.Context) {
	select {
	case back := <-s.probed:
		s.probing = false
		for _, bkt := range back {
			delete(s.aside, bkt)
		}
		if len(back) > 0 {
			s.looked = time.Time{} // another server may have taken over the node
		}
	default:
	}
	if s.probing || len(s.aside) == 0 || time.Since(s.looked) < lookEvery {
		return
	}
	s.probing = true
	buckets := slices.Collect(maps.Keys(s.aside))
	s.probes.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, roundTimeout)
		defer cancel()
		errs := s.ask(ctx, len(buckets), func(p redis.Pipeliner, i int) { p.XLen(ctx, streamKey(buckets[i])) })
		var back []int16
		for i, err := range errs {
			if err == nil {
				back = append(back, buckets[i])
			}
		}
		s.probed <- back
	})
}

// present returns the rows of the buckets that are not set aside.
func (s *Sync) present() []LedgerBucket {
	return slices.DeleteFunc(slices.Clone(s.rows), func(r LedgerBucket) bool { return s.aside[r.Bucket] != nil })
}

func wrongType(err error) bool { return redis.HasErrorPrefix(err, "WRONGTYPE") }

// waiting returns the buckets whose streams have entries, and updates the metrics. It skips buckets that are set aside.
func (s *Sync) waiting(ctx context.Context) ([]int16, error) {
	all := bucketsOf(s.present())
	heads := make([]*redis.XMessageSliceCmd, len(all))
	err := s.setAside(all, s.ask(ctx, len(all), func(p redis.Pipeliner, i int) {
		heads[i] = p.XRangeN(ctx, streamKey(all[i]), "-", "+", 1)
	}))
	if err != nil {
		s.metrics.lag.Set(time.Since(s.seen).Seconds()) // operations may have waited since then
		return nil, fmt.Errorf("look at the streams: %w", err)
	}
	s.seen = time.Now()
	var busy []int16
	var lag time.Duration
	for i, bkt := range all {
		for _, m := range heads[i].Val() {
			busy = append(busy, bkt)
			if t, ok := streamTime(m.ID); ok {
				lag = max(lag, time.Since(t))
			}
		}
	}
	s.metrics.lag.Set(lag.Seconds())
	return busy, nil
}

// apply reads a batch from those of the buckets that no other sync has locked, commits it to the ledger, and drops the
// entries from the streams.
func (s *Sync) apply(ctx context.Context, buckets []int16) (int, error) {
	tx, err := s.o.Pool.Begin(ctx)
	if err != nil {
		return 0, fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	rows, err := lockBuckets(ctx, tx, buckets)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	entries, last, err := s.read(ctx, rows)
	if err != nil || len(entries) == 0 {
		return 0, err
	}
	l := newLedger(rows)
	if err := l.take(ctx, tx, entries); err != nil {
		return 0, err
	}
	if err := s.failpoint("before_commit"); err != nil {
		return 0, err
	}
	if err := tx.Commit(ctx); err != nil {
		return 0, fmt.Errorf("commit the ledger: %w", err)
	}
	s.report(l)
	if err := s.failpoint("after_commit"); err != nil {
		return 0, err
	}
	return len(entries), s.ack(ctx, last, l)
}

func bucketsOf(rows []LedgerBucket) []int16 {
	list := make([]int16, len(rows))
	for i, r := range rows {
		list[i] = r.Bucket
	}
	return list
}

// read reads the first entries of the streams, and returns the last id read from each bucket. Every commit is followed
// by dropping its entries, so the first entries are usually new. The ledger recognizes any that it already has.
func (s *Sync) read(ctx context.Context, rows []LedgerBucket) (entries []*entry, last map[int16]string, err error) {
	per := int64(max(1, min(batchEntries, batchTotal/len(rows))))
	cmds := make([]*redis.XMessageSliceCmd, len(rows))
	err = s.setAside(bucketsOf(rows), s.ask(ctx, len(rows), func(p redis.Pipeliner, i int) {
		cmds[i] = p.XRangeN(ctx, streamKey(rows[i].Bucket), "-", "+", per)
	}))
	if err != nil {
		return nil, nil, fmt.Errorf("read the streams: %w", err)
	}
	last = map[int16]string{}
	for i, r := range rows {
		for _, m := range cmds[i].Val() {
			e, err := parseEntry(r.Bucket, m.ID, m.Values)
			e.fault = err
			entries = append(entries, e)
			last[r.Bucket] = m.ID
		}
	}
	return entries, last, nil
}

// ack drops the committed entries from the streams, up to the last id of each bucket, and records in the accounts which
// operations are in the ledger. It freezes the accounts in Redis that the ledger froze.
func (s *Sync) ack(ctx context.Context, last map[int16]string, l *ledger) error {
	of := map[int16][]*LedgerAccount{}
	for user, a := range l.accounts {
		b := Bucket(user)
		of[b] = append(of[b], a)
	}
	buckets := slices.Collect(maps.Keys(last))
	errs := s.ask(ctx, len(buckets), func(p redis.Pipeliner, i int) {
		bkt := buckets[i]
		keys, args := []string{streamKey(bkt), epochKey(bkt)}, []any{after(last[bkt]), l.rows[bkt].Epoch}
		for _, a := range of[bkt] {
			key := accountKey(a.UserID)
			if a.Frozen != "" {
				p.FCall(ctx, fnFreeze, []string{key}, a.Frozen)
			}
			keys, args = append(keys, key), append(args, a.LastSeq)
		}
		p.FCall(ctx, fnAck, keys, args...)
	})
	var loaded error
	if slices.ContainsFunc(errs, functionMissing) {
		// The entries stay in the stream, and the ledger recognizes them when they are read again.
		loaded = loadLibrary(ctx, s.o.Redis)
		for i, err := range errs {
			if functionMissing(err) {
				errs[i] = nil
			}
		}
	}
	if err := s.setAside(buckets, errs); err != nil {
		return fmt.Errorf("drop what the ledger has: %w", err)
	}
	return loaded
}

// after returns the smallest id greater than id.
func after(id string) string {
	ms, seq, _ := strings.Cut(id, "-")
	if n, err := strconv.ParseUint(seq, 10, 64); err == nil && n < math.MaxUint64 {
		return ms + "-" + strconv.FormatUint(n+1, 10)
	}
	if n, err := strconv.ParseUint(ms, 10, 64); err == nil && n < math.MaxUint64 {
		return strconv.FormatUint(n+1, 10) + "-0"
	}
	return id
}

// report updates the metrics for a committed batch, and logs what an operator must examine.
func (s *Sync) report(l *ledger) {
	for i := range l.batch.Events {
		s.metrics.written.WithLabelValues(l.batch.Events[i].Type).Inc()
	}
	for user, reason := range l.froze {
		s.metrics.frozen.WithLabelValues(reason).Inc()
		s.log.Error("account frozen: its operations contradict the ledger", "user_id", user, "reason", reason)
	}
	for bkt, n := range l.holes {
		s.metrics.lost.Add(float64(n))
		s.log.Error("operations are missing from a stream", "bucket", bkt, "operations", n)
	}
}
