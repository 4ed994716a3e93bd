package credits

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/pause"
)

func (b *Bank) apply(ctx context.Context, op *Op) (Result, error) {
	if op.User == uuid.Nil || op.Amount < 1 || op.Amount > MaxAmount || !storable(op.Reference) ||
		(op.Kind != Add && op.Kind != Deduct) {
		return Result{}, fmt.Errorf("%w: user, amount, reference or kind out of range", ErrUnavailable)
	}
	if err := b.check(ctx); err != nil {
		return Result{}, err
	}
	a := attempt{b: b, op: op, bucket: Bucket(op.User)}
	res, err := insist(ctx, func() (Result, error) { return a.once(ctx) })
	return res, a.certain(err)
}

// retryable is the error of a call that may be repeated.
type retryable struct{ error }

func (r retryable) Unwrap() error { return r.error }

// insist repeats do while its error is retryable, for patience.
func insist[T any](ctx context.Context, do func() (T, error)) (T, error) {
	deadline := time.Now().Add(patience)
	wait := pause.Backoff{First: 5 * time.Millisecond, Most: 100 * time.Millisecond}
	for {
		v, err := do()
		if !errors.As(err, new(retryable)) || time.Now().After(deadline) || pause.About(ctx, wait.Next()) != nil {
			return v, err
		}
	}
}

// attempt is the state of one call of Apply.
type attempt struct {
	b      *Bank
	op     *Op
	bucket int16
	// askedIn is the epoch in which the ledger did not have the operation. In a later epoch, the ledger may have it.
	askedIn int64
	// doubt is the error of a call whose outcome is unknown: Redis may have carried it out, or may do so later. Only a
	// recorded outcome of the operation settles the question.
	doubt error
}

// certain returns err, or an ErrUnknown if an earlier call may have carried out the operation.
func (a *attempt) certain(err error) error {
	if err == nil || a.doubt == nil || errors.Is(err, ErrUnknown) || errors.Is(err, ErrReused) {
		return err
	}
	return fmt.Errorf("%w: %w; then %w", ErrUnknown, a.doubt, err)
}

// once calls the function and acts on its reply. Its error may be retryable.
func (a *attempt) once(ctx context.Context) (Result, error) {
	v, err := a.b.view(ctx, a.bucket)
	if err != nil {
		return Result{}, err
	}
	r, waited, err := a.send(ctx, v)
	if err != nil {
		return Result{}, err
	}
	switch r[0] {
	case string(OK), string(Insufficient), string(Overflow), replay:
		return a.result(v, r, waited)
	case "ASK":
		return a.ledger(ctx, v)
	case "MISS":
		// While the account is being loaded, the operation may enter the ledger.
		a.askedIn = 0
		return Result{}, a.b.load(ctx, a.op.User, a.op.Kind == Add)
	case "EPOCH":
		return Result{}, a.b.reopen(ctx, a.bucket, v)
	case "MISMATCH":
		return Result{}, ErrReused
	case "UNKNOWN":
		return Result{}, ErrUnknownUser
	case "FROZEN":
		return Result{}, ErrFrozen
	case "BACKPRESSURE":
		return Result{}, ErrBackpressure
	default: // CORRUPT, BAD_AMOUNT
		a.b.log.Error("account cannot be used", "user_id", a.op.User, "code", r[0])
		return Result{}, fmt.Errorf("%w: %w", ErrUnavailable, errCorrupt)
	}
}

// replay is the code of a reply with the outcome of an earlier call.
const replay = "REPLAY"

// send calls the function. It repeats a call with an unknown outcome once: the reply to the second call shows the
// outcome of the first. waited is nil if the write is durable.
func (a *attempt) send(ctx context.Context, v view) (r []string, waited, err error) {
	op := a.op
	fn := fnAdd
	if op.Kind == Deduct {
		fn = fnDeduct
	}
	ask := "0"
	switch {
	case a.askedIn == v.epoch:
		ask = "2"
	case a.old(v):
		ask = "1"
	}
	ttl := OutcomeTTL + min(max(time.Until(op.MintedAt), 0), mostAhead)
	user, t := op.User.String(), tag(a.bucket)
	key := t + ":a:" + user
	fcall := []any{
		"FCALL", fn, 4, key, outcomeKeyIn(a.bucket, op.User, op.ID), t + ":s", t + ":ep",
		op.Amount, op.fp(), user, op.ID.String(), v.epoch, v.floor, ttl.Milliseconds(), a.b.maxStream,
		a.b.o.Durability.name(), ask, op.Reference,
	}
	r, waited, err = a.b.calls.call(ctx, key, fcall)
	if err != nil && !nothingDone(err) {
		a.doubt = err
		r, waited, err = a.b.calls.call(ctx, key, fcall)
		if err != nil && !nothingDone(err) {
			return nil, nil, fmt.Errorf("%w: %w; then %w", ErrUnknown, a.doubt, err)
		}
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return r, waited, err
}

// old reports whether Redis may have dropped the outcome of an operation with this key. If so, the ledger must be read.
func (a *attempt) old(v view) bool {
	minted := a.op.MintedAt
	age := time.Since(minted)
	limit := youngLimit
	if a.b.o.KeyMaxAge > 0 {
		limit = min(limit, a.b.o.KeyMaxAge)
	}
	return minted.IsZero() || age > limit || age < -clockSlack || time.Since(v.bumped) < OutcomeTTL
}

// ledger looks up the operation in Postgres. Redis requested that in a call with the epoch of v.
func (a *attempt) ledger(ctx context.Context, v view) (Result, error) {
	look, cancel := context.WithTimeout(ctx, patience)
	e, err := EntryByOp(look, a.b.o.Pool, a.op.User, a.op.ID)
	cancel()
	switch {
	case errors.Is(err, ErrEntryNotFound):
		if a.b.o.KeyMaxAge > 0 && !a.op.MintedAt.IsZero() && time.Since(a.op.MintedAt) > a.b.o.KeyMaxAge {
			return Result{}, ErrExpired
		}
		a.askedIn = v.epoch
		return a.once(ctx)
	case err != nil:
		return Result{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	case !bytes.Equal(e.Fingerprint, a.op.Fingerprint[:]):
		return Result{}, ErrReused
	}
	res := resultOf(e)
	res.Replayed = true
	return res, nil
}

// result parses the reply of a function: code, outcome, amount, balance, seq, durability, stream id, n. waited is why
// the outcome is not durable yet.
func (a *attempt) result(v view, r []string, waited error) (Result, error) {
	if len(r) != 8 {
		return Result{}, fmt.Errorf("%w: the reply has %d fields", ErrUnknown, len(r))
	}
	if waited != nil {
		return Result{}, fmt.Errorf("%w: %w", ErrUnknown, waited)
	}
	a.b.told(a.bucket, v.epoch, r[7])
	res := Result{
		OpID: a.op.ID, User: a.op.User, Kind: a.op.Kind, Outcome: Outcome(r[1]), Durability: r[5],
		Replayed: r[0] == replay,
	}
	var ok bool
	res.At, ok = streamTime(r[6])
	if !ok || !parseInts(r[2:], &res.Amount, &res.Balance, &res.Seq) {
		return Result{}, fmt.Errorf("%w: the reply cannot be read", ErrUnknown)
	}
	return res, nil
}

// parseInts parses texts into numbers, and reports whether all of them are numbers.
func parseInts(texts []string, into ...*int64) bool {
	for i, n := range into {
		var err error
		if *n, err = strconv.ParseInt(texts[i], 10, 64); err != nil {
			return false
		}
	}
	return true
}
