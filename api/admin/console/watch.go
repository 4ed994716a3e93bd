package console

import (
	"cmp"
	"context"
	_ "embed" // for feed.lua
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/ops"
	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

const (
	// pollEvery is the shortest interval between two reads of a source: somewhat less than the second after which a
	// page requests the state again. groupsEvery and deadEvery are those of the sources that cost more.
	pollEvery   = 800 * time.Millisecond
	groupsEvery = 2 * time.Second
	deadEvery   = 5 * time.Second
	// sourceTimeout bounds a read.
	sourceTimeout = 2 * time.Second
	// pingTimeout bounds the ping of a server that did not answer in time.
	pingTimeout = 500 * time.Millisecond
	// share limits a source to 1/share of the time: slow reads are repeated less often, at most longestGap apart. A
	// read may also appear slow because this process was suspended.
	share      = 10
	longestGap = 10 * time.Second
	// oldAfter is the age after which an answer is no longer current.
	oldAfter = longestGap + sourceTimeout + 3*time.Second
)

// Limits of the data that is shown.
const (
	maxStreams = 256
	maxGroups  = 200
	maxShards  = 800 // streams, summed over all shown groups
	maxEvents  = 50
	maxNew     = 20 // per stream and read
)

// source is data that requests read, at most once in every.
type source[T any] struct {
	// reading is held during a read, so that reads do not overlap. It guards began, before and due.
	reading sync.Mutex
	every   time.Duration
	read    func(ctx context.Context) (T, error)
	began   time.Time     // of the last read
	before  time.Duration // that it took
	due     time.Time     // of the next read

	mu      sync.Mutex
	value   T
	asOf    time.Time // when value was read; zero: never
	err     error     // of the last read
	failing time.Time // when reads began to fail
	well    time.Time // when reads began to succeed
	looked  time.Time // when the last read ended
}

// staleAfter is the age after which a read is ignored. While a page is open, the pause between two reads is shorter.
const staleAfter = 30 * time.Second

// errNoRelay means that no relay has worked on the table yet.
var errNoRelay = errors.New("no relay has run yet")

// errSlow means that a server answers a ping, but not the queries.
var errSlow = errors.New("it answers, but not these queries in time: the outbox is very large or locked, or the " +
	"server is busy")

// errNotYet means that a read could not start. It says nothing about the source.
var errNotYet = errors.New("Postgres has not named the streams yet")

// partial is the error of a read that returned some data.
type partial struct{ error }

func (p partial) Unwrap() error { return p.error }

// Look is the last value of a source and its time. While reads fail, Value is that of AsOf.
type Look[T any] struct {
	ops.Answer
	Value T `json:"value"`
}

func (s *source[T]) look() Look[T] {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.looked) > staleAfter {
		return Look[T]{} // left over from an earlier page
	}
	l := Look[T]{Value: s.value}
	l.Well = s.well
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

// refresh reads the source if a read is due and none is running.
func (s *source[T]) refresh(ctx context.Context) {
	if !s.reading.TryLock() {
		return
	}
	defer s.reading.Unlock()
	if time.Now().After(s.due) {
		s.once(ctx)
	}
}

// fresh returns after a read that began after the call. Concurrent callers share it.
func (s *source[T]) fresh(ctx context.Context) {
	called := time.Now()
	s.reading.Lock()
	defer s.reading.Unlock()
	if !s.began.After(called) {
		s.once(ctx)
	}
}

// once reads the source for all pages, so a read does not end with the request that began it. The caller holds reading.
func (s *source[T]) once(ctx context.Context) {
	began := time.Now()
	took := s.take(context.WithoutCancel(ctx), began)
	s.due, s.before = time.Now().Add(s.rest(took, s.before)), took
}

// take reads the source and returns how long that took; 0 if it failed, because the source may recover at any moment.
func (s *source[T]) take(ctx context.Context, began time.Time) time.Duration {
	rctx, cancel := context.WithTimeout(ctx, sourceTimeout)
	defer cancel()
	v, err := s.read(rctx)
	if errors.Is(err, errNotYet) {
		return 0
	}
	s.began = began
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
		return 0
	}
	if s.err != nil || s.well.IsZero() || began.Sub(s.looked) > staleAfter {
		s.well = now
	}
	s.value, s.asOf, s.err, s.looked = v, now, nil, now
	return now.Sub(began)
}

// refused reports whether a server answered with err, as opposed to a failed connection.
func refused(err error) bool {
	return sql.SQLState(err) != "" || errors.Is(err, sql.ErrSchemaMissing) || errors.Is(err, sql.ErrSchemaNewer)
}

// rest is the pause after a read, given its duration and that of the one before. It uses the shorter one: after a
// single slow read, changes must show soon.
func (s *source[T]) rest(took, before time.Duration) time.Duration {
	return max(s.every, min((share-1)*took, (share-1)*before, longestGap))
}

type Postgres struct {
	ops.Postgres
	// Streams is the number of streams. At most maxStreams of them are read.
	Streams int `json:"streams"`
	// Shop reports whether the database has the tables of the shop.
	Shop bool `json:"shop"`
}

type Stream struct {
	Name string `json:"stream"`
	// Base names the type: its only stream, or the common part of its streams' names.
	Base string `json:"base"`
	// Length, Added (the entries ever added) and Memory (bytes, estimated by Redis) are -1 if they are unknown.
	Length int64  `json:"length"`
	Added  int64  `json:"added"`
	Memory int64  `json:"memory"`
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

// deadList is the dead events that are shown, and the number of all.
type deadList struct {
	dead          []ops.Dead
	groups        []consumer.DeadEntry
	relay, groupN int64
}

// watch reads Postgres and Redis for requests.
type watch struct {
	o        *Options
	sink     *sink.Sink
	postgres source[Postgres]
	redis    source[ops.Memory]
	feed     source[[]Stream]
	groups   source[[]sink.Group]
	dead     source[deadList]

	last map[string]string // stream -> last entry id read; used by readFeed only

	mu      sync.Mutex
	events  []Event           // newest last
	streams []string          // as last read from Postgres
	bases   map[string]string // of all streams: see outbox.Stream
	lost    time.Time         // when a stream was last found truncated or missing
}

func newWatch(o *Options) *watch {
	w := &watch{o: o, last: map[string]string{}}
	if o.Redis != nil {
		w.sink = sink.New(sink.Options{Client: o.Redis, Durability: o.Doctor.Durability})
	}
	w.postgres = source[Postgres]{every: pollEvery, read: w.readPostgres}
	w.redis = source[ops.Memory]{every: pollEvery, read: w.readRedis}
	w.feed = source[[]Stream]{every: pollEvery, read: w.readFeed}
	w.groups = source[[]sink.Group]{every: groupsEvery, read: w.readGroups}
	w.dead = source[deadList]{every: deadEvery, read: w.readDead}
	return w
}

// refresh reads every source that is due.
func (w *watch) refresh(ctx context.Context) {
	if _, _, err := w.names(); err != nil {
		w.postgres.refresh(ctx) // it reads the names of the streams
	}
	var wg sync.WaitGroup
	for _, read := range []func(context.Context){
		w.postgres.refresh, w.redis.refresh, w.feed.refresh, w.groups.refresh, w.dead.refresh,
	} {
		wg.Go(func() { read(ctx) })
	}
	wg.Wait()
}

// look returns the data for the charts, unless it is more than 5 s old.
func (w *watch) look(now time.Time) seen {
	var s seen
	if p := w.postgres.look(); p.AsOf != nil && p.Error == "" && now.Sub(*p.AsOf) < 5*time.Second {
		rows, oldest := float64(p.Value.Backlog.Rows), p.Value.Backlog.OldestSeconds
		s.written, s.backlog, s.oldest = &counter{value: float64(p.Value.Written), at: *p.AsOf}, &rows, &oldest
	}
	f := w.feed.look()
	// the sum is valid only over all streams
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
	o := w.o
	from := ops.Source{Pool: o.Pool, RelayName: o.RelayName, Slots: o.Slots, Relay: o.Relay}
	p, err := from.ReadPostgres(ctx)
	if errors.Is(err, pgx.ErrNoRows) {
		// If no relay has run yet, the row is missing. posthaste status inserts it in the same way.
		if err = sql.Register(ctx, o.Pool, o.RelayName); err == nil {
			p, err = from.ReadPostgres(ctx)
		}
		if sql.Denied(err) { // the role of serve lacks the right
			err = errNoRelay
		}
	}
	if err != nil {
		// An error of the schema explains the error that it caused.
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
	shop, err := sql.HasLine(ctx, o.Pool, sql.LineShop)
	if err != nil {
		return Postgres{}, err
	}
	w.mu.Lock()
	w.streams, w.bases = outbox.StreamNames(streams[:min(len(streams), maxStreams)]), outbox.Bases(streams)
	w.mu.Unlock()
	return Postgres{Postgres: p, Streams: len(streams), Shop: shop}, nil
}

// names returns the streams that are read, at most maxStreams, and the Base of each that has one.
func (w *watch) names() (names []string, bases map[string]string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams == nil {
		err = errNotYet
	}
	return w.streams, w.bases, err
}

func (w *watch) readRedis(ctx context.Context) (ops.Memory, error) {
	if err := w.sink.Ready(ctx); err != nil {
		return ops.Memory{}, err
	}
	memory, err := redisurl.Info(ctx, w.o.Redis, "memory")
	used, _ := strconv.ParseInt(memory["used_memory"], 10, 64)
	limit, _ := strconv.ParseInt(memory["maxmemory"], 10, 64)
	return ops.Memory{UsedBytes: used, MaxBytes: limit, Policy: memory["maxmemory_policy"]}, err
}

//go:embed feed.lua
var feedText string

var feedScript = redis.NewScript(feedText)

// readFeed reads every stream, and keeps the newest events.
func (w *watch) readFeed(ctx context.Context) ([]Stream, error) {
	names, bases, err := w.names()
	if err != nil {
		return nil, err
	}
	streams := make([]Stream, 0, len(names))
	var fresh []Event
	lost := false
	defer func() { // also of those that were read before one failed: they are not read again
		slices.SortStableFunc(fresh, func(a, b Event) int { return outbox.CompareIDs(a.EntryID, b.EntryID) })
		w.mu.Lock()
		defer w.mu.Unlock()
		if lost {
			w.lost = time.Now()
		}
		w.events = append(w.events, fresh...)
		w.events = w.events[max(0, len(w.events)-maxEvents):]
	}()
	for _, name := range names {
		last := w.last[name]
		st := Stream{Name: name, Base: cmp.Or(bases[name], name)}
		reply, err := feedScript.RunRO(ctx, w.o.Redis, []string{name}, last, maxNew).Slice()
		if notAStream(err) {
			st.Length, st.Added, st.Memory = -1, -1, -1
			streams = append(streams, st)
			continue // the list of dead events shows its events
		}
		if err != nil {
			return nil, err
		}
		if len(reply) < 4 {
			continue
		}
		st.Length, st.Added = integer(reply[0]), integer(reply[1])
		st.LastID, st.Memory = str(reply[2]), integer(reply[3])
		streams = append(streams, st)
		for i := len(reply) - 1; i >= 4; i-- {
			if f, ok := reply[i].([]any); ok && len(f) == 6 {
				fresh = append(fresh, Event{
					EntryID: str(f[0]), ID: str(f[1]), Type: str(f[2]), Subject: str(f[3]), Time: str(f[4]),
					Stream: name, Replayed: str(f[5]) == "1",
				})
			}
		}
		w.last[name] = st.LastID
		lost = lost || last != "" && (st.LastID == "" || outbox.CompareIDs(st.LastID, last) < 0)
	}
	return streams, nil
}

// first returns the first of joined errors: usually all streams have the same cause.
func first(err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()[0]
	}
	return err
}

// recent returns the kept events, oldest first, and when a stream was last found truncated or missing, or the zero
// time.
func (w *watch) recent() (events []Event, lost time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Event{}, w.events...), w.lost
}

func (w *watch) readGroups(ctx context.Context) ([]sink.Group, error) {
	names, bases, err := w.names()
	if err != nil {
		return nil, err
	}
	groups, err := sink.Groups(ctx, w.o.Redis, names)
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // the errors.Join of Groups
		// A key of another type has no groups. The list of dead events shows its events.
		err = errors.Join(slices.DeleteFunc(slices.Clone(joined.Unwrap()), notAStream)...)
	}
	if err = first(err); err != nil && len(groups) > 0 {
		err = partial{err}
	}
	return sink.GroupsOfTypes(groups, bases), err
}

func (w *watch) readDead(ctx context.Context) (deadList, error) {
	var l deadList
	var err error
	if l.dead, err = ops.ListDead(ctx, w.o.Pool); err != nil {
		return deadList{}, err
	}
	if l.relay, err = sql.CountDead(ctx, w.o.Pool); err != nil {
		return deadList{}, err
	}
	streams, err := sql.ListStreams(ctx, w.o.Pool)
	if err != nil {
		return deadList{}, err
	}
	l.groups, l.groupN, err = consumer.DeadHeads(ctx, w.o.Redis, outbox.StreamNames(streams), maxDead)
	bases := outbox.Bases(streams)
	for _, g := range l.groups {
		l.dead = append(l.dead, ops.GroupDead(g, w.o.StreamPrefix, bases))
	}
	if err != nil {
		// If Redis or one of its nodes is down, the page still shows the relay's dead events and those of the other
		// nodes.
		err = partial{fmt.Errorf("those of consumer groups: %w", first(err))}
	}
	return l, err
}

// notAStream reports whether err means that a key has another type. Events for that key are dead, and shown as such.
func notAStream(err error) bool { return sink.Class(err) == "wrongtype" }

func integer(v any) int64 {
	n, _ := v.(int64)
	return n
}

// str returns a text from Redis as valid UTF-8.
func str(v any) string {
	s, _ := v.(string)
	return strings.ToValidUTF8(s, "?")
}
