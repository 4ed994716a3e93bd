package ops

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
	"posthaste/sql"
)

// Snapshot is what is known at a moment, the verdict's only input. Whoever looks fills in what it knows: what was not
// looked at stays zero and is not judged.
type Snapshot struct {
	Now   time.Time
	Asked Asked
	// Postgres is what Postgres told.
	Postgres Postgres
	// Redis is what Redis told of its memory.
	Redis Memory
	// Relay is what the relay of this process says of itself; nil in a process without one.
	Relay *relay.Health
	// WALBudget is how many bytes of WAL the slot may hold back; 0 if that is not known.
	WALBudget int64
	Dead      DeadCount
	Groups    []sink.Group
	// Lost is when somebody who watches has found that Redis has lost data; nil if nobody has.
	Lost *time.Time
	// Streams is how many streams there are, Looked how many of them are looked at at most; 0 for all.
	Streams, Looked int
	// Fresh is how old an answer of Postgres or Redis may be to be taken for the present; 0 for any age.
	Fresh time.Duration
}

// Asked tells how each source answered. Dead, Groups and Streams may fail although both servers answer.
type Asked struct{ Postgres, Redis, Dead, Groups, Streams Answer }

// Answer is how a server, or somebody asked for a part of it, answered. The zero value was not asked, or has not
// answered yet.
type Answer struct {
	// AsOf is when the last answer was true; nil if there was none.
	AsOf *time.Time
	// Error is the last question's, "" if it was answered. Since is when the questions began to fail, Well when they
	// began to be answered.
	Error string
	Since *time.Time
	Well  time.Time
	// Refused: it did answer, with that error. Slow: it is there, but what was asked took too long.
	Refused, Slow bool
}

// known reports whether there is an answer and the last question was answered.
func (a Answer) known() bool { return a.AsOf != nil && a.Error == "" }

// open reports whether nothing is known: no answer, and no failure to answer.
func (a Answer) open() bool { return a.AsOf == nil && a.Error == "" }

// Postgres is what Postgres tells of the pipeline.
type Postgres struct {
	Status
	// Written counts the numbers given out to events. Led reports whether any relay leads, Relays how many are
	// connected: 0 if this role may not see them.
	Written int64 `json:"written"`
	Led     bool  `json:"led"`
	Relays  int   `json:"relays"`
}

// ReadPostgres reads the status, and the relays' pulse. relay is that of this process, or nil.
func ReadPostgres(
	ctx context.Context, pool *pgxpool.Pool, name string, slots outbox.Slots, relay *relay.Relay,
) (Postgres, error) {
	return readPostgres(ctx, pool, name, slots, relay, 0)
}

func readPostgres(
	ctx context.Context, pool *pgxpool.Pool, name string, slots outbox.Slots, relay *relay.Relay, most int64,
) (Postgres, error) {
	st, err := readStatus(ctx, pool, name, slots, relay, most)
	if err != nil {
		return Postgres{}, err
	}
	pulse, err := sql.ReadPulse(ctx, pool)
	if sql.SQLState(err) == pgerrcode.InsufficientPrivilege {
		pulse, err = sql.Pulse{Led: true}, nil // a role that may not see locks cannot tell that none is held
	}
	return Postgres{Status: st, Written: pulse.Written, Led: pulse.Led, Relays: pulse.Relays}, err
}

// Memory is what Redis tells of its memory. A Policy of "" is not known.
type Memory struct {
	UsedBytes int64  `json:"used_bytes"`
	MaxBytes  int64  `json:"max_bytes"` // 0: no limit
	Policy    string `json:"policy"`
}

// Source is where the snapshot of a single look comes from. (The console, which looks again and again, has one of its
// own.)
type Source struct {
	Pool      *pgxpool.Pool
	RelayName string
	Slots     outbox.Slots
	// Relay is the relay of this process, or nil. It knows of Redis; without one Redis is asked for its error, or, if
	// that is nil as well, left out.
	Relay *relay.Relay
	Redis func(ctx context.Context) error
	// WALBudget is the setting.
	WALBudget int64
	// Most bounds how many events are counted that wait, so that a look costs the same however many they are; 0: all.
	Most int64
}

// redisTimeout bounds the question to Redis: a server that hangs must not hold up what Postgres told.
const redisTimeout = 2 * time.Second

// Look reads a snapshot. Its error is that of Postgres; Redis' is in the snapshot.
func (s Source) Look(ctx context.Context) (*Snapshot, error) {
	asked := make(chan Answer, 1)
	go func() { asked <- s.askRedis(ctx) }()
	p, err := readPostgres(ctx, s.Pool, s.RelayName, s.Slots, s.Relay, s.Most)
	var dead []Dead
	if err == nil && p.Dead > 0 {
		dead, err = ListDead(ctx, s.Pool)
	}
	redis := <-asked
	if err != nil {
		return nil, err
	}
	snap := &Snapshot{Now: time.Now(), Postgres: p, WALBudget: s.WALBudget, Dead: CountDead(dead, p.Dead, 0)}
	snap.Asked.Postgres, snap.Asked.Redis = Answer{AsOf: &snap.Now}, redis
	if s.Relay != nil {
		h := s.Relay.Health()
		snap.Relay = &h
	}
	return snap, nil
}

func (s Source) askRedis(ctx context.Context) Answer {
	now := time.Now()
	switch {
	case s.Relay != nil:
		return redisOf(s.Relay.Health(), now)
	case s.Redis == nil:
		return Answer{}
	}
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	if err := s.Redis(ctx); err != nil {
		return Answer{Error: oneLine(err)}
	}
	return Answer{AsOf: &now}
}

// redisOf is what a relay, which asks Redis every second, knows of it.
func redisOf(h relay.Health, now time.Time) Answer {
	const condition = "redis: "
	if i := slices.IndexFunc(h.Reasons, func(r string) bool { return strings.HasPrefix(r, condition) }); i >= 0 {
		return Answer{Error: h.Reasons[i][len(condition):]}
	}
	return Answer{AsOf: &now}
}

// DeadCount counts dead events: Relay and Groups those that wait for somebody, Retrying those on their way.
type DeadCount struct {
	Relay    int `json:"relay"`
	Groups   int `json:"groups"`
	Retrying int `json:"retrying"`
	// First is the reason of the oldest.
	First string `json:"first"`
}

// CountDead counts dead events, of which list has the first, relay and groups how many there are in all.
func CountDead(list []Dead, relay, groups int64) DeadCount {
	n := DeadCount{Groups: int(groups)}
	for _, d := range list {
		switch {
		case d.Retrying:
			n.Retrying++
		case n.First == "":
			n.First = d.Error
		}
	}
	n.Relay = max(int(relay)-n.Retrying, 0)
	return n
}
