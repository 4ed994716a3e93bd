package credits

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// rebuildLost rebuilds every bucket in which Redis has lost operations or the epoch. If a bucket cannot be rebuilt,
// rebuildLost continues with the others.
func (s *Sync) rebuildLost(ctx context.Context) error {
	rows := s.present()
	states, err := s.look(ctx, rows)
	if err != nil {
		return err
	}
	for i, r := range rows {
		switch {
		case s.aside[r.Bucket] != nil:
			continue
		case states[i].foreign:
			err = errForeign // nothing can be rebuilt over a key of another type
		case states[i].ahead(r):
			err = s.follow(ctx, r.Bucket)
		case states[i].lost(r), states[i].tail(r):
			err = s.rebuild(ctx, r.Bucket)
		default:
			err = nil
		}
		if err != nil && !errors.Is(err, errForeign) && !ofKeys(err) {
			err = fmt.Errorf("rebuild bucket %d: %w", r.Bucket, err)
			if _, many := s.o.Redis.(*redis.ClusterClient); !many || ctx.Err() != nil {
				return err
			}
			s.aside[r.Bucket] = err
			continue
		}
		s.tell(r.Bucket, err)
	}
	return nil
}

// ofKeys reports whether the server refused a command because of a bucket's keys, as opposed to a temporary refusal of
// all commands (READONLY, LOADING, CLUSTERDOWN, …).
func ofKeys(err error) bool {
	refused, ok := errors.AsType[redis.Error](err)
	return ok && (strings.HasPrefix(refused.Error(), "ERR ") || wrongType(refused))
}

// tell logs why a bucket stays closed, once per reason.
func (s *Sync) tell(bkt int16, err error) {
	if err == nil {
		delete(s.stuck, bkt)
		return
	}
	if why := err.Error(); s.stuck[bkt] != why {
		s.stuck[bkt] = why
		s.log.Error("the bucket's accounts cannot be used: an operator must examine its keys in Redis", "bucket", bkt,
			"err", err)
	}
}

var errForeign = errors.New("a key of the bucket holds something of another type")

// state is the state of a bucket in Redis.
type state struct {
	epoch string
	// n is the number of the last operation, seen is the highest number that a caller has sent, length is the length of
	// the stream.
	n, seen, length int64
	// evicted is what the server has evicted, noted what it had when the epoch began; see evictions.
	evicted, noted string
	// stopped is set if the bucket was stopped, foreign if a key of it has another type.
	stopped, foreign bool
}

// lost reports whether Redis has lost operations, outcomes or the epoch, compared with a row of the ledger read before
// or after. An unused bucket is not lost.
func (t state) lost(r LedgerBucket) bool {
	if t.epoch == "" && t.n == 0 && !t.stopped && t.length == 0 && r.Mark == 0 && r.BumpedAt == nil {
		return false
	}
	return t.number() < r.Epoch || t.n < r.Mark || t.evicted != "" && t.evicted != t.noted
}

// number returns the epoch as a number; 0 if the bucket is stopped or the epoch is not a number.
func (t state) number() int64 {
	const most = 1 << 53
	n, err := strconv.ParseInt(t.epoch, 10, 64)
	if err != nil || n > most {
		return 0
	}
	return n
}

// ahead reports whether Redis has a later epoch than the ledger. r must be locked; otherwise the ledger may have
// reached that epoch since r was read.
func (t state) ahead(r LedgerBucket) bool { return t.number() > r.Epoch }

// tail reports whether the end of the stream is missing. r must be locked; otherwise the entries may have been written
// to the ledger since r was read.
func (t state) tail(r LedgerBucket) bool { return t.length == 0 && t.n > r.Mark }

// look reads the states of buckets from Redis. A bucket without an answer is set aside, and its state is empty.
func (s *Sync) look(ctx context.Context, rows []LedgerBucket) ([]state, error) {
	var loaded error
	for try := 0; ; try++ {
		cmds := make([]*redis.Cmd, len(rows))
		errs := s.ask(ctx, len(rows), func(p redis.Pipeliner, i int) {
			cmds[i] = p.FCall(ctx, fnLook, []string{epochKey(rows[i].Bucket), streamKey(rows[i].Bucket)})
		})
		if slices.ContainsFunc(errs, functionMissing) && try == 0 {
			loaded = loadLibrary(ctx, s.o.Redis) // a failure on one node only matters to the buckets of that node
			continue
		}
		if err := s.setAside(bucketsOf(rows), errs); err != nil {
			return nil, fmt.Errorf("look at the buckets: %w", errors.Join(err, loaded))
		}
		states := make([]state, len(rows))
		for i := range rows {
			if errs[i] != nil {
				continue
			}
			var err error
			if states[i], err = readState(cmds[i]); err != nil {
				return nil, fmt.Errorf("look at bucket %d: %w", rows[i].Bucket, err)
			}
			states[i].evicted = s.evicted.of(ctx, s.o.Redis, rows[i].Bucket)
		}
		return states, nil
	}
}

func readState(cmd *redis.Cmd) (t state, err error) {
	f, err := cmd.StringSlice()
	if wrongType(err) {
		return state{foreign: true}, nil
	}
	if err == nil && len(f) != 5 {
		err = fmt.Errorf("a reply of %d fields", len(f))
	}
	if err != nil {
		return state{}, err
	}
	t.epoch, t.noted, t.stopped = f[0], f[4], f[2] != ""
	for j, v := range []*int64{&t.n, &t.seen, &t.length} {
		*v, _ = strconv.ParseInt(f[j+1], 10, 64) // printed by Lua, so it parses, unless there is none
	}
	return t, nil
}

// rebuild closes a bucket, writes the remaining entries of its stream to the ledger, raises the epoch and opens the
// bucket with the new epoch. If it fails at any step, the bucket stays closed, and the next round starts again.
func (s *Sync) rebuild(ctx context.Context, bkt int16) error {
	if sure, err := s.close(ctx, bkt); err != nil || !sure {
		return err
	}
	for n := 1; n > 0; {
		var err error
		if n, err = s.apply(ctx, []int16{bkt}); err != nil {
			return err
		}
	}
	epoch, top, err := s.bump(ctx, bkt)
	if err != nil || epoch == 0 {
		return err
	}
	if err := s.failpoint("after_bump"); err != nil {
		return err
	}
	_, err = call(ctx, s.o.Redis, fnOpen, []string{epochKey(bkt), streamKey(bkt)}, epoch, top,
		s.evicted.of(ctx, s.o.Redis, bkt))
	return err
}

// locked calls do with the row of a bucket, locked, and the bucket's state in Redis. It does not call do if another
// sync has the row, or if a key of the bucket has another type.
func (s *Sync) locked(ctx context.Context, bkt int16, do func(tx pgx.Tx, r LedgerBucket, t state) error) error {
	return pgx.BeginFunc(ctx, s.o.Pool, func(tx pgx.Tx) error {
		rows, err := lockBuckets(ctx, tx, []int16{bkt})
		if err != nil || len(rows) == 0 {
			return err
		}
		states, err := s.look(ctx, rows)
		if err != nil || states[0].foreign {
			return err
		}
		return do(tx, rows[0], states[0])
	})
}

// follow sets the ledger's epoch to the epoch of Redis. Postgres has lost the epoch because it was restored to an
// earlier time. The next scan finds other losses.
func (s *Sync) follow(ctx context.Context, bkt int16) error {
	var from, to int64
	err := s.locked(ctx, bkt, func(tx pgx.Tx, r LedgerBucket, t state) error {
		if !t.ahead(r) {
			return nil
		}
		from, to = r.Epoch, t.number()
		_, err := tx.Exec(ctx, query("epoch_raise"), bkt, to)
		return err
	})
	if err == nil && to > 0 {
		s.log.Error("the ledger was behind the epoch of redis: was postgres restored to an earlier time?", "bucket",
			bkt, "epoch", to, "ledger_epoch", from)
	}
	return err
}

// close stops a bucket if, with the row locked, it has certainly lost operations.
func (s *Sync) close(ctx context.Context, bkt int16) (sure bool, err error) {
	err = s.locked(ctx, bkt, func(_ pgx.Tx, r LedgerBucket, t state) error {
		if sure = t.lost(r) || t.tail(r); !sure {
			return nil
		}
		_, err := call(ctx, s.o.Redis, fnStop, []string{epochKey(bkt)}, r.Mark)
		return err
	})
	return sure, err
}

// bump raises the epoch of a bucket that is closed and empty. It returns epoch 0 if the bucket is not, or if another
// sync has the row.
func (s *Sync) bump(ctx context.Context, bkt int16) (epoch, top int64, err error) {
	var lost int64
	err = s.locked(ctx, bkt, func(tx pgx.Tx, r LedgerBucket, t state) error {
		if t.epoch != "" || t.length > 0 {
			return nil
		}
		// Numbers never restart: top is at least every number that a process has seen in an older epoch.
		top = max(r.Mark, t.n, t.seen)
		lost = top - r.Mark // the ledger gives these operations up
		return tx.QueryRow(ctx, query("epoch_bump"), bkt, top).Scan(&epoch)
	})
	if err != nil {
		return 0, 0, fmt.Errorf("raise the epoch: %w", err)
	}
	if epoch == 0 {
		return 0, 0, nil
	}
	s.metrics.bumps.Inc()
	s.metrics.lost.Add(float64(lost))
	s.log.Error("redis had lost operations or evicted keys: the bucket is rebuilt from the ledger", "bucket", bkt,
		"epoch", epoch, "lost_operations", lost)
	return epoch, top, nil
}
