package sql

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// An answer of the database about its incarnation is used for so long, and awaited for so long.
const (
	incarnationGood    = time.Second
	incarnationTimeout = time.Second
)

// Incarnation knows which database a pool reaches, and which server process runs it: by when that was started. A
// promoted standby or a restored backup is another process, and may lack what was committed to the one before. So is a
// server that was restarted. It is safe for concurrent use.
type Incarnation struct {
	pool   *Pool
	asking singleflight.Group

	mu sync.Mutex
	// last is the name that was seen last; its server was started then.
	last    string
	started time.Time
	// until is when the database is asked again.
	until time.Time
}

// NewIncarnation returns one that asks over pool. It does no I/O.
func NewIncarnation(pool *Pool) *Incarnation { return &Incarnation{pool: pool} }

// ReadIncarnation asks the database for its name, and when its server was started.
func ReadIncarnation(ctx context.Context, db DB) (name string, started time.Time, err error) {
	if err := db.QueryRow(ctx, query("incarnation")).Scan(&started, &name); err != nil {
		return "", time.Time{}, fmt.Errorf("read the incarnation of the database: %w", err)
	}
	return fmt.Sprintf("%d %s", started.UnixMicro(), name), started, nil
}

// Last returns the incarnation that was seen last. It asks the database only if none was seen yet; "" means that the
// database has not answered.
func (i *Incarnation) Last(ctx context.Context) string {
	i.mu.Lock()
	last := i.last
	i.mu.Unlock()
	if last == "" {
		return i.Confirmed(ctx)
	}
	return last
}

// Confirmed returns the incarnation that the database had a second ago, or later. It asks once a second at most, for
// all callers. While the database does not answer, the last one counts.
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

// Forget has the next Confirmed ask: no answer counts any more.
func (i *Incarnation) Forget() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.until = time.Time{}
}

// Of returns the name of the incarnation that an order was written or read in. It replaces a question, unless the order
// is of another server process than the last: then no incarnation has the name, and the next Confirmed asks.
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
