package credits

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
)

// linearCall is an operation of a history, linearReply its reply.
type linearCall struct {
	kind   Kind // "" reads the balance
	amount int64
}

type linearReply struct {
	outcome Outcome
	balance int64
}

// account is the sequential model that must explain a history. Its state is the balance.
var account = porcupine.Model{
	Init: func() any { return int64(0) },
	Step: func(state, input, output any) (bool, any) {
		balance, in, out := state.(int64), input.(linearCall), output.(linearReply)
		after, want := balance, OK
		switch in.kind {
		case Add:
			after += in.amount
		case Deduct:
			if after -= in.amount; after < 0 {
				after, want = balance, Insufficient
			}
		}
		return out.outcome == want && out.balance == after, after
	},
}

// Several processes use one account while its key is deleted and the functions are flushed. Their replies are those of
// one account that executes one operation at a time.
func TestLinearizable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	user := uuid.New()
	w.run()
	workers, each := 6, 60
	if os.Getenv("POSTHASTE_TEST_FULL") == "1" {
		workers, each = 10, 400
	}
	began := time.Now()
	first := newOp(user, Add, 1)
	r := w.must(first, OK)
	history := []porcupine.Operation{{
		Input: linearCall{Add, 1}, Output: linearReply{outcome: OK, balance: r.Balance},
		Return: int64(time.Since(began)),
	}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for id := range workers {
		b := w.newBank()
		wg.Go(func() {
			for i := range each {
				if id == 0 && i%10 == 0 {
					w.redis.Client.Del(context.Background(), accountKey(user))
				}
				if id == 1 && i%20 == 0 {
					w.redis.Client.FunctionFlush(context.Background())
				}
				in := linearCall{[]Kind{Add, Deduct, Deduct, ""}[rand.N(4)], 1 + rand.N(int64(20))}
				start := int64(time.Since(began))
				out, err := perform(b, user, in)
				end := int64(time.Since(began))
				if err != nil {
					t.Errorf("%s: %v", in.kind, err)
					return
				}
				mu.Lock()
				history = append(history, porcupine.Operation{
					ClientId: id + 1, Input: in, Output: out, Call: start, Return: end,
				})
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if got := porcupine.CheckOperationsTimeout(account, history, 30*time.Second); got != porcupine.Ok {
		t.Errorf("the history of %d operations is not linearizable: %s", len(history), got)
	}
}

// perform repeats the call until it has a reply.
func perform(b *Bank, user uuid.UUID, in linearCall) (linearReply, error) {
	ctx := context.Background()
	op := newOp(user, in.kind, in.amount)
	for try := 0; ; try++ {
		if in.kind == "" {
			bal, err := b.Balance(ctx, user)
			if err == nil || try == 20 || !errors.Is(err, ErrUnavailable) {
				return linearReply{outcome: OK, balance: bal.Balance}, err
			}
			continue
		}
		r, err := b.Apply(ctx, op)
		if err == nil || try == 20 || !errors.Is(err, ErrUnavailable) {
			return linearReply{outcome: r.Outcome, balance: r.Balance}, err
		}
	}
}
