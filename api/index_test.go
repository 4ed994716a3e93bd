package api

import (
	"context"
	"os"
	"testing"
)

// Each way in which Redis may lose a key or grant it twice, with the whole service. With the unique index there is
// always one order. Without it (the mutation) there are two, which shows that the fault is real.
func TestTheUniqueIndexArbitrates(t *testing.T) {
	t.Parallel()
	flush := func(w *world) error { return w.redis.Client.FlushAll(context.Background()).Err() }
	for _, c := range []struct {
		name string
		// point is where the first request is when Redis loses the key; "": it has been answered.
		point string
		lose  func(w *world) error
	}{
		{"a lease is lost before the transaction", "after_acquire", flush},
		{"a commit whose failure is guessed and its key deleted", "after_commit", flush},
		{"flushed", "", flush},
		{"restarted without its file", "", func(w *world) error {
			if err := w.redis.Kill(); err != nil {
				return err
			}
			if err := os.RemoveAll(w.redis.Dir + "/appendonlydir"); err != nil {
				return err
			}
			return w.redis.Start(context.Background())
		}},
		{"gone", "", func(w *world) error { return w.redis.Kill() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, weak := range []bool{false, true} {
				w := newWorld(t)
				if weak {
					w.dropIndex()
				}
				first, again := w.twice(c.point, c.lose)
				want(t, first, 201, "")
				want(t, again, 201, "")
				if same := first.body == again.body; same == weak {
					t.Errorf("without the index: %v; %v, then %v", weak, first, again)
				}
				if n := w.rows(); (n == 2) != weak {
					t.Errorf("without the index: %v, %d orders", weak, n)
				}
				if !weak {
					w.checkInvariants(1)
				}
			}
		})
	}
}

func (w *world) dropIndex() {
	w.tb.Helper()
	w.db.Exec(w.tb, "ALTER TABLE orders DROP CONSTRAINT orders_user_id_idem_key_key")
}

// twice places an order and places it again through another process, after Redis has lost the key while the first
// request was at point.
func (w *world) twice(point string, lose func(w *world) error) (first, again reply) {
	w.tb.Helper()
	key := newKey()
	if point == "" {
		first = w.post(key, orderJSON(1))
		w.published()
		must(w.tb, lose(w))
		return first, w.sibling().post(key, orderJSON(1), "Prefer", "wait=10")
	}
	reached, goOn, answer := make(chan struct{}), make(chan struct{}), make(chan reply, 1)
	w.s.failpoint = once(point, func(context.Context) { close(reached); <-goOn })
	go func() { answer <- w.post(key, orderJSON(1)) }()
	<-reached
	must(w.tb, lose(w))
	again = w.sibling().post(key, orderJSON(1))
	close(goOn)
	return <-answer, again
}
