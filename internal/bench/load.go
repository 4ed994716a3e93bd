package bench

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
)

const (
	aggregateType = "bench"
	eventType     = "bench.event"
)

// eventID is the id of event n: whoever sees it knows which one it is.
func eventID(n int) uuid.UUID {
	var id uuid.UUID
	id[6], id[8] = 0x70, 0x80
	for i := range 6 {
		id[15-i] = byte(n >> (8 * i))
	}
	return id
}

// eventNumber is the n of an id.
func eventNumber(id string) (n int, ok bool) {
	if len(id) != 36 {
		return 0, false
	}
	v, err := strconv.ParseUint(id[24:], 16, 48)
	return int(v), err == nil && eventID(int(v)).String() == id
}

// payloadOf is a JSON object of about so many bytes, which does not compress.
func payloadOf(size int) string {
	pad := make([]byte, 0, size)
	for len(pad) < size-len(`{"pad": ""}`) {
		pad = append(pad, uuid.NewString()...)
	}
	return fmt.Sprintf(`{"pad": %q}`, pad[:max(0, size-len(`{"pad": ""}`))])
}

// insertMany writes events %[1]d … %[2]d in transactions of %[4]d.
const (
	insertEvent = `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)`
	insertMany  = `DO $$ BEGIN FOR i IN %[1]d..%[2]d BY %[4]d LOOP ` + insertEvent + `
	SELECT ('00000000-0000-7000-8000-' ||
		lpad(to_hex(n), 12, '0'))::uuid, '` + aggregateType + `', n::text, '` + eventType + `', '%[3]s'
	FROM generate_series(i, least(i + %[4]d - 1, %[2]d)) n; COMMIT; END LOOP; END $$`
)

// write has the server write events 0 … n-1 in transactions of so many, over several connections. Clients of its own
// would take processors from what is measured.
func (s *scene) write(ctx context.Context, n, size, transaction int) error {
	chunk := max(500, transaction)
	payload := payloadOf(size)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range writers {
		g.Go(func() error {
			for {
				from := int(next.Add(int64(chunk))) - chunk
				if from >= n {
					return nil
				}
				to := min(from+chunk, n)
				if _, err := s.pool.Exec(ctx, fmt.Sprintf(insertMany, from, to-1, payload, transaction)); err != nil {
					return fmt.Errorf("write events: %w", err)
				}
			}
		})
	}
	return g.Wait()
}

// load calls do with 0, 1, 2 … from several goroutines. With a rate every call has its time, and what it takes counts
// from then, even when it could only begin later because earlier ones were slow: a stall is felt by everything that
// would have happened during it. Without a rate each goroutine calls again at once, and one of them goes on until a
// call is counted: a machine that stands still for all of the time has a rate, too.
type load struct {
	workers int
	rate    float64
	// warm comes before lasts; its calls are not counted.
	warm, lasts time.Duration
	do          func(ctx context.Context, n int, due time.Time) error
}

// loadWarm is long enough to open connections and prepare statements.
const loadWarm = 500 * time.Millisecond

// run returns what the counted calls took, and how many there were in all. It ends at the first error.
func (l load) run(ctx context.Context) (took []time.Duration, calls int, err error) {
	began := time.Now()
	counts, ends := began.Add(l.warm), began.Add(l.warm+l.lasts)
	each := make([][]time.Duration, l.workers)
	var next, made, counted atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for w := range l.workers {
		g.Go(func() error {
			for {
				due := time.Now()
				n := int(next.Add(1)) - 1
				if l.rate > 0 {
					due = began.Add(time.Duration(float64(n) / l.rate * float64(time.Second)))
				}
				if !due.Before(ends) && (l.rate > 0 || w > 0 || counted.Load() > 0) {
					return nil
				}
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Until(due)):
				}
				if err := l.do(ctx, n, due); err != nil {
					return err
				}
				made.Add(1)
				if !due.Before(counts) {
					counted.Add(1)
					each[w] = append(each[w], time.Since(due))
				}
			}
		})
	}
	err = g.Wait()
	for _, t := range each {
		took = append(took, t...)
	}
	return took, int(made.Load()), err
}
