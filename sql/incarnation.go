package sql

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// incarnationGood is how long an answer of the database is used; incarnationTimeout bounds the query.
const (
	incarnationGood    = time.Second
	incarnationTimeout = time.Second
)

// Incarnation identifies the database that a pool reaches and the server process that runs it, by the start time of the
// process. A promoted standby, a restored backup and a restarted server are new incarnations; the first two may lack
// transactions that were committed before. It is safe for concurrent use.
type Incarnation struct {
	pool   *Pool
	asking singleflight.Group

	mu sync.Mutex
	// last is the newest known name; started is the start time of its server.
	last    string
	started time.Time
	// until is when last expires.
	until time.Time
}

// NewIncarnation returns an Incarnation that queries pool. It does no I/O.
func NewIncarnation(pool *Pool) *Incarnation { return &Incarnation{pool: pool} }

// ReadIncarnation returns the name of the database's incarnation and when its server was started.
func ReadIncarnation(ctx context.Context, db DB) (name string, started time.Time, err error) {
	if err := db.QueryRow(ctx, query("incarnation")).Scan(&started, &name); err != nil {
		return "", time.Time{}, fmt.Errorf("read the incarnation of the database: %w", err)
	}
	return fmt.Sprintf("%d %s", started.UnixMicro(), name), started, nil
}

// Last returns the newest known incarnation. It queries the database only if none is known; "" means that the database
// did not answer.
func (i *Incarnation) Last(ctx context.Context) string {
	i.mu.Lock()
	last := i.last
	i.mu.Unlock()
	if last == "" {
		return i.Confirmed(ctx)
	}
	return last
}

// Confirmed returns an incarnation that the database confirmed at most a second ago. All callers share one query a
// second. While the database does not answer, it returns the newest known one.
func (i *Incarnation) Confirmed(ctx context.Context) string {
	i.mu.Lock()
	last, good := i.last, time.Now().Before(i.until)
	i.mu.Unlock()
	if good {
		return last
	}
	v, _, _ := i.asking.Do("", func() (any, error) { return i.ask(ctx), nil })
	return v.(string)
}

func (i *Incarnation) ask(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), incarnationTimeout)
	defer cancel()
	began := time.Now()
	name, started, err := ReadIncarnation(ctx, i.pool)
	i.mu.Lock()
	defer i.mu.Unlock()
	if err != nil {
		i.until = time.Now().Add(incarnationGood)
		return i.last
	}
	i.last, i.started, i.until = name, started, began.Add(incarnationGood)
	return name
}

// Forget invalidates the answer that Confirmed keeps.
func (i *Incarnation) Forget() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.until = time.Time{}
}

// Of returns the name of the incarnation in which an order was written or read, without a query. If another server
// process than the newest known one wrote the order, the name matches no incarnation, and the next Confirmed queries
// the database.
func (i *Incarnation) Of(o *Order) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !o.ServerStarted.Equal(i.started) {
		i.until = time.Time{}
		return strconv.FormatInt(o.ServerStarted.UnixMicro(), 10)
	}
	i.until = time.Now().Add(incarnationGood)
	return i.last
}
