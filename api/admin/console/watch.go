package console

import (
	"context"
	_ "embed" // the feed's script
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

// How often each source is asked while somebody looks, and how long it may take to answer.
const (
	postgresEvery = time.Second
	redisEvery    = time.Second
	feedEvery     = 400 * time.Millisecond
	groupsEvery   = 2 * time.Second
	deadEvery     = 5 * time.Second
	sourceTimeout = 2 * time.Second
	// pingTimeout bounds the question whether a server that took too long is there at all.
	pingTimeout = 500 * time.Millisecond
	// share is what part of the time a source may be busy for us: a read that took long is repeated less often, but not
	// so seldom that what it said is old. (A read takes any time if this process is stopped meanwhile.)
	share      = 10
	longestGap = 10 * time.Second
	// oldAfter is from when on an answer is not taken for the present.
	oldAfter = longestGap + sourceTimeout + 3*time.Second
)

// Limits of what is shown.
const (
	maxStreams = 256
	maxGroups  = 200
	maxShards  = 800 // of all shown groups: what they are on each stream of a type that has several
	maxEvents  = 50  // remembered, for a page that has just been opened
	maxNew     = 20  // per stream and look
)

// source is something that is asked again and again.
type source[T any] struct {
	// reading is held while it is asked, so that it is never asked twice at once.
	reading sync.Mutex
	every   time.Duration
	read    func(ctx context.Context) (T, error)

	mu      sync.Mutex
	value   T
	asOf    time.Time // of value; zero if there is none
	err     error     // of the last look
	failing time.Time // since when, if it fails
	well    time.Time // since when, if it does not
	looked  time.Time // when the last look ended
}

// staleAfter is from when on a look counts as none: the longest pause between two is shorter while somebody looks.
const staleAfter = 30 * time.Second

// errNoRelay is the error of a table that no relay has worked on yet.
var errNoRelay = errors.New("no relay has run yet")

// errSlow is the error of a server that answers, but not what was asked.
var errSlow = errors.New("it answers, but not these queries in time: the outbox is very large or locked, or the " +
	"server is busy")

// errNotYet is the error of a look that could not begin: it says nothing about what was to be looked at.
var errNotYet = errors.New("Postgres has not named the streams yet")

// partial is the error of a look that saw something all the same.
type partial struct{ error }

func (p partial) Unwrap() error { return p.error }

// Look is what is known of a source: a value, and when it was true.
type Look[T any] struct {
	// AsOf is nil as long as there was no answer.
	AsOf *time.Time `json:"as_of"`
	// Error is the last look's, and Since when it began to fail; the value is then that of AsOf.
	Error string     `json:"error,omitempty"`
	Since *time.Time `json:"since,omitempty"`
	// Refused: it did answer, with that error.
	Refused bool `json:"refused,omitempty"`
	// Slow: it is there, but what was asked took too long.
	Slow  bool `json:"slow,omitempty"`
	Value T    `json:"value"`
	// well is since when every look has succeeded.
	well time.Time
}

// answer is how the source answered.
func (l Look[T]) answer() ops.Answer {
	return ops.Answer{AsOf: l.AsOf, Error: l.Error, Since: l.Since, Well: l.well, Refused: l.Refused, Slow: l.Slow}
}

func (s *source[T]) look() Look[T] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.looked) > staleAfter {
		return Look[T]{} // from a time when somebody else looked
	}
	l := Look[T]{Value: s.value, well: s.well}
	if !s.asOf.IsZero() {
		at := s.asOf
		l.AsOf = &at
	}
	if s.err != nil {
		since := s.failing
		l.Error, l.Since, l.Refused, l.Slow = plain(s.err), &since, refused(s.err), errors.Is(s.err, errSlow)
	}
	return l
}

func (s *source[T]) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var none T
	s.value, s.asOf, s.err, s.well = none, time.Time{}, nil, time.Time{}
}

// once asks, unless somebody is asking already, and returns how long it took.
func (s *source[T]) once(ctx context.Context) time.Duration {
	if !s.reading.TryLock() {
		return 0
	}
	defer s.reading.Unlock()
	began := time.Now()
	rctx, cancel := context.WithTimeout(ctx, sourceTimeout)
	defer cancel()
	v, err := s.read(rctx)
	if ctx.Err() != nil || errors.Is(err, errNotYet) {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if err != nil {
		if s.err == nil || began.Sub(s.looked) > staleAfter {
			s.failing = began
		}
		s.looked, s.err = now, err
		if errors.As(err, new(partial)) {
			s.value, s.asOf = v, now
			return now.Sub(began)
		}
		return 0 // it may be back at any moment
	}
	if s.err != nil || s.well.IsZero() {
		s.well = now
	}
	s.value, s.asOf, s.err, s.looked = v, now, nil, now
	return now.Sub(began)
}

// refused tells an error that a server answered with from one on the way to it.
func refused(err error) bool {
	return sql.SQLState(err) != "" || errors.Is(err, sql.ErrSchemaMissing) || errors.Is(err, sql.ErrSchemaNewer)
}

// loop asks while somebody looks, until ctx ends.
func (s *source[T]) loop(ctx context.Context, h *hub) {
	var before time.Duration
	for {
		awake := h.waking()
		select {
		case <-awake:
		default:
			// What it said an hour ago must not be taken for now.
			s.reset()
			select {
			case <-ctx.Done():
			case <-awake:
			}
		}
		if ctx.Err() != nil {
			return
		}
		took := s.once(ctx)
		select {
		case <-ctx.Done():
		case <-time.After(s.rest(took, before)):
		}
		before = took
	}
}

// rest is how long to wait after a look that took so long, and the one before it. What took long once may be quick
// again, and what happens meanwhile is to be seen soon.
func (s *source[T]) rest(took, before time.Duration) time.Duration {
	return max(s.every, min((share-1)*took, (share-1)*before, longestGap))
}

// Postgres is what Postgres says.
type Postgres struct {
	ops.Postgres
	// Streams is how many there are; no more than maxStreams of them are looked at.
	Streams int `json:"streams"`
}

// Stream is one stream.
type Stream struct {
	Name   string `json:"stream"`
	Length int64  `json:"length"`
	Added  int64  `json:"added"`
	LastID string `json:"last_id"`
}

// Event is one published event, without its payload.
type Event struct {
	ID       string `json:"id"`
	Type     string `json:"type"`
	Subject  string `json:"subject"`
	Time     string `json:"time"`
	Stream   string `json:"stream"`
	EntryID  string `json:"entry_id"`
	Replayed bool   `json:"replayed,omitempty"`
}

// deadList is what is parked anywhere, as far as it is shown, and how much that is in all.
type deadList struct {
	dead          []ops.Dead
	groups        []consumer.DeadEntry
	relay, groupN int64
}

// watch asks Postgres and Redis while somebody looks.
type watch struct {
	c        *Console
	sink     *sink.Sink
	postgres source[Postgres]
	redis    source[ops.Memory]
	feed     source[[]Stream]
	groups   source[[]sink.Group]
	dead     source[deadList]

	mu      sync.Mutex
	last    map[string]string // stream -> last entry id seen
	events  []Event           // newest last
	streams []string          // as Postgres last named them
	bases   map[string]string // of all streams: see outbox.Stream
	lost    time.Time         // when a stream was last found to have gone back
}

func newWatch(c *Console) *watch {
	w := &watch{c: c, last: map[string]string{}}
	if c.o.Redis != nil {
		w.sink = sink.New(sink.Options{Client: c.o.Redis, Durability: c.o.Doctor.Durability})
	}
	w.postgres = source[Postgres]{every: postgresEvery, read: w.readPostgres}
	w.redis = source[ops.Memory]{every: redisEvery, read: w.readRedis}
	w.feed = source[[]Stream]{every: feedEvery, read: w.readFeed}
	w.groups = source[[]sink.Group]{every: groupsEvery, read: w.readGroups}
	w.dead = source[deadList]{every: deadEvery, read: w.readDead}
	return w
}

func (w *watch) run(ctx context.Context, g *errgroup.Group) {
	for _, loop := range []func(context.Context, *hub){
		w.postgres.loop, w.redis.loop, w.feed.loop, w.groups.loop,
		w.dead.loop,
	} {
		g.Go(func() error { loop(ctx, w.c.hub); return nil })
	}
}

// refresh asks everything once, for somebody who looks only once.
func (w *watch) refresh(ctx context.Context) {
	w.postgres.once(ctx) // first: it names the streams
	var wg sync.WaitGroup
	wg.Go(func() { w.redis.once(ctx) })
	wg.Go(func() { w.feed.once(ctx) })
	wg.Go(func() { w.groups.once(ctx) })
	wg.Go(func() { w.dead.once(ctx) })
	wg.Wait()
}

// look returns what the charts need, as far as it is not older than a few seconds.
func (w *watch) look(now time.Time) seen {
	var s seen
	if p := w.postgres.look(); p.AsOf != nil && p.Error == "" && now.Sub(*p.AsOf) < 5*time.Second {
		rows, oldest := float64(p.Value.Backlog.Rows), p.Value.Backlog.OldestSeconds
		s.written, s.backlog, s.oldest = &counter{value: float64(p.Value.Written), at: *p.AsOf}, &rows, &oldest
	}
	f := w.feed.look()
	// a part of the sum is none
	if f.AsOf != nil && f.Error == "" && now.Sub(*f.AsOf) < 5*time.Second && len(f.Value) < maxStreams {
		added := 0.0
		for _, st := range f.Value {
			added += float64(max(st.Added, 0))
		}
		s.added = &counter{added, *f.AsOf, len(f.Value)}
	}
	return s
}

func (w *watch) readPostgres(ctx context.Context) (Postgres, error) {
	o := w.c.o
	p, err := ops.ReadPostgres(ctx, o.Pool, o.RelayName, o.Slots, o.Relay)
	if errors.Is(err, pgx.ErrNoRows) {
		// No relay has run yet; posthaste status makes the row in the same way.
		if err = sql.Register(ctx, o.Pool, o.RelayName); err == nil {
			p, err = ops.ReadPostgres(ctx, o.Pool, o.RelayName, o.Slots, o.Relay)
		}
		if sql.Denied(err) { // the role of serve cannot
			err = errNoRelay
		}
	}
	if err != nil {
		// What is wrong with the schema says more than what came of it.
		if serr := sql.CheckSchema(ctx, o.Pool); errors.Is(serr, sql.ErrSchemaMissing) ||
			errors.Is(serr, sql.ErrSchemaNewer) {
			err = serr
		}
		if errors.Is(err, context.DeadlineExceeded) {
			pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingTimeout)
			defer cancel()
			if o.Pool.Ping(pctx) == nil {
				err = errSlow
			}
		}
		return Postgres{}, err
	}
	streams, err := sql.ListStreams(ctx, o.Pool)
	if err != nil {
		return Postgres{}, err
	}
	w.mu.Lock()
	w.streams, w.bases = outbox.StreamNames(streams[:min(len(streams), maxStreams)]), outbox.Bases(streams)
	w.mu.Unlock()
	return Postgres{Postgres: p, Streams: len(streams)}, nil
}

// names are the streams, as far as they are looked at.
func (w *watch) names() ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams == nil {
		return nil, errNotYet
	}
	return w.streams, nil
}

// basesOf has the Base of each stream that names has.
func (w *watch) basesOf() map[string]string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.bases
}

func (w *watch) readRedis(ctx context.Context) (ops.Memory, error) {
	if err := w.sink.Ready(ctx); err != nil {
		return ops.Memory{}, err
	}
	info, err := w.c.o.Redis.InfoMap(ctx, "memory").Result()
	if err != nil {
		return ops.Memory{}, err
	}
	memory := info["Memory"]
	used, _ := strconv.ParseInt(memory["used_memory"], 10, 64)
	limit, _ := strconv.ParseInt(memory["maxmemory"], 10, 64)
	return ops.Memory{UsedBytes: used, MaxBytes: limit, Policy: memory["maxmemory_policy"]}, nil
}

//go:embed feed.lua
var feedText string

var feedScript = redis.NewScript(feedText)

// readFeed looks at every stream and passes on what is new.
func (w *watch) readFeed(ctx context.Context) ([]Stream, error) {
	names, err := w.names()
	if err != nil {
		return nil, err
	}
	streams := make([]Stream, 0, len(names))
	var fresh []Event
	for _, name := range names {
		w.mu.Lock()
		last := w.last[name]
		w.mu.Unlock()
		reply, err := feedScript.RunRO(ctx, w.c.o.Redis, []string{name}, last, maxNew).Slice()
		if notAStream(err) {
			streams = append(streams, Stream{Name: name, Length: -1, Added: -1})
			continue // its events are parked, which is said elsewhere
		}
		if err != nil {
			return nil, err
		}
		if len(reply) < 3 {
			continue
		}
		st := Stream{Name: name, Length: integer(reply[0]), Added: integer(reply[1]), LastID: str(reply[2])}
		streams = append(streams, st)
		for i := len(reply) - 1; i >= 3; i-- {
			if f, ok := reply[i].([]any); ok && len(f) == 6 {
				fresh = append(fresh, Event{
					EntryID: str(f[0]), ID: str(f[1]), Type: str(f[2]), Subject: str(f[3]), Time: str(f[4]),
					Stream: name, Replayed: str(f[5]) == "1",
				})
			}
		}
		w.mu.Lock()
		if last != "" && (st.LastID == "" || outbox.CompareIDs(st.LastID, last) < 0) {
			w.lost = time.Now()
		}
		w.last[name] = st.LastID
		w.mu.Unlock()
	}
	if len(fresh) > 0 {
		sortByEntry(fresh)
		w.mu.Lock()
		w.events = append(w.events, fresh...)
		w.events = w.events[max(0, len(w.events)-maxEvents):]
		w.mu.Unlock()
		w.c.hub.send("events", fresh)
	}
	return streams, nil
}

// lastLoss returns when a stream was last found to have gone back, or to be gone; zero if none was.
func (w *watch) lastLoss() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// recent returns the remembered events, oldest first.
func (w *watch) recent() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Event{}, w.events...)
}

func (w *watch) readGroups(ctx context.Context) ([]sink.Group, error) {
	names, err := w.names()
	if err != nil {
		return nil, err
	}
	groups, err := sink.Groups(ctx, w.c.o.Redis, names)
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // of the errors.Join in Groups
		// A key of another kind has no groups; its events are parked, which is said elsewhere.
		err = errors.Join(slices.DeleteFunc(slices.Clone(joined.Unwrap()), notAStream)...)
	}
	if err != nil && len(groups) > 0 {
		err = partial{err}
	}
	return sink.GroupsOfTypes(groups, w.basesOf()), err
}

func (w *watch) readDead(ctx context.Context) (deadList, error) {
	var l deadList
	var err error
	if l.dead, err = ops.ListDead(ctx, w.c.o.Pool); err != nil {
		return deadList{}, err
	}
	if l.relay, err = sql.CountDead(ctx, w.c.o.Pool); err != nil {
		return deadList{}, err
	}
	streams, err := sql.ListStreams(ctx, w.c.o.Pool)
	if err != nil {
		return deadList{}, err
	}
	l.groups, l.groupN, err = consumer.DeadHeads(ctx, w.c.o.Redis, outbox.StreamNames(streams), maxShown)
	bases := outbox.Bases(streams)
	for _, g := range l.groups {
		l.dead = append(l.dead, ops.GroupDead(g, w.c.o.StreamPrefix, bases))
	}
	if err != nil {
		// Without Redis, or without one node of it, the relay's own and those of the other nodes can still be looked
		// after.
		err = partial{fmt.Errorf("those of consumer groups: %w", err)}
	}
	return l, err
}
