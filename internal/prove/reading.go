package prove

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/oracle"
	"posthaste/internal/pause"
)

// streams reads and changes the streams of the sink.
type streams interface {
	// Range returns up to n entries from an id on; "-" is the first one.
	Range(ctx context.Context, stream, from string, n int64) ([]redis.XMessage, error)
	// Newest returns up to n entries before an id, the newest first; "+" is the last one.
	Newest(ctx context.Context, stream, to string, n int64) ([]redis.XMessage, error)
	// Remove deletes an entry, Add adds a copy of one.
	Remove(ctx context.Context, stream, id string) error
	Add(ctx context.Context, stream string, m redis.XMessage) error
}

// redisStreams are those of Redis.
type redisStreams struct{ client *redis.Client }

func (r redisStreams) Range(ctx context.Context, stream, from string, n int64) ([]redis.XMessage, error) {
	return r.client.XRangeN(ctx, stream, from, "+", n).Result()
}

func (r redisStreams) Newest(ctx context.Context, stream, to string, n int64) ([]redis.XMessage, error) {
	return r.client.XRevRangeN(ctx, stream, to, "-", n).Result()
}

func (r redisStreams) Remove(ctx context.Context, stream, id string) error {
	return r.client.XDel(ctx, stream, id).Err()
}

func (r redisStreams) Add(ctx context.Context, stream string, m redis.XMessage) error {
	return r.client.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: m.Values}).Err()
}

// book records the entries read from a stream.
type book interface {
	// See records the next entry, and returns the promise that it breaks.
	See(e oracle.Entry) *oracle.Breach
	// Unsee removes the last entry: Redis has lost it.
	Unsee(id uuid.UUID)
	// Forget removes all entries.
	Forget()
}

// sight is an entry that was read.
type sight struct {
	at string
	id uuid.UUID
}

// sightsMost bounds the entries that a reader keeps. If Redis loses more, the reader reads the whole stream again.
const sightsMost = 200_000

// reader reads a stream continuously. It always reads its last entry again, and so detects that Redis has lost entries.
type reader struct {
	stream  string
	book    book
	streams streams
	broken  func(*oracle.Breach)
	// forgot is called when Redis has lost entries. It reports whether a fault may have caused that.
	forgot func() bool

	mu     sync.Mutex
	recent []sight
}

func (r *reader) run(ctx context.Context) {
	for ctx.Err() == nil {
		n, err := r.read(ctx)
		switch {
		case err != nil:
			pause.For(ctx, 100*time.Millisecond)
		case n == 0:
			pause.For(ctx, 25*time.Millisecond)
		}
	}
}

// page is the number of entries read at once. It is small because some entries have a megabyte.
const page = 200

// read reads the next entries and returns their number.
func (r *reader) read(ctx context.Context) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	from := "-"
	if n := len(r.recent); n > 0 {
		from = r.recent[n-1].at
	}
	list, err := r.streams.Range(ctx, r.stream, from, page)
	if err != nil {
		return 0, err
	}
	if n := len(r.recent); n > 0 {
		if len(list) == 0 || !r.recent[n-1].is(r.stream, list[0]) {
			return 0, r.goBack(ctx)
		}
		list = list[1:]
	}
	for _, m := range list {
		r.take(m)
	}
	if over := len(r.recent) - sightsMost; over > sightsMost/4 {
		r.recent = append(r.recent[:0:0], r.recent[over:]...)
	}
	return len(list), nil
}

// is reports whether the message is the entry that was read before.
func (s sight) is(stream string, m redis.XMessage) bool {
	e, err := oracle.ParseEntry(stream, m)
	return err == nil && e.At == s.at && e.ID == s.id
}

func (r *reader) take(m redis.XMessage) {
	e, err := oracle.ParseEntry(r.stream, m)
	if err != nil {
		r.broken(&oracle.Breach{
			Promise: "phantom", Stream: r.stream, Entry: m.ID, What: "an entry without an event's id",
		})
		return
	}
	if !e.Replay {
		if b := r.book.See(e); b != nil {
			b.Stream, b.Entry = r.stream, m.ID
			r.broken(b)
		}
	}
	r.recent = append(r.recent, sight{at: e.At, id: e.ID})
}

// goBack finds the last entry that still exists and removes all later ones. Redis loses the newest entries of a stream,
// or all of them.
func (r *reader) goBack(ctx context.Context) error {
	n := len(r.recent)
	low, high := 0, n // the first low entries exist; those from high on do not
	for low < high {
		mid := (low + high) / 2
		list, err := r.streams.Range(ctx, r.stream, r.recent[mid].at, 1)
		if err != nil {
			return err
		}
		if len(list) == 1 && r.recent[mid].is(r.stream, list[0]) {
			low = mid + 1
		} else {
			high = mid
		}
	}
	if !r.forgot() {
		gone := r.recent[low]
		r.broken(&oracle.Breach{
			Promise: "lost", Event: gone.id.String(), Stream: r.stream, Entry: gone.at,
			What: fmt.Sprintf("%d entries have left the stream, and nothing was done to the server that explains it",
				n-low),
		})
		return nil
	}
	for i := n - 1; i >= low; i-- {
		r.book.Unsee(r.recent[i].id)
	}
	r.recent = r.recent[:low]
	if low == 0 { // older entries are gone, too
		r.book.Forget()
	}
	return nil
}

// typed is the book of one stream, whose events have one type.
type typed struct {
	*oracle.Pass
	typ string
}

// Forget implements book.
func (t typed) Forget() { t.ForgetType(t.typ) }
