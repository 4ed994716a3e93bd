package ops

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
	"posthaste/sql"
)

// Snapshot is the known state at a moment, the only input of the verdict. Fields that the caller could not read stay
// zero and are not judged.
type Snapshot struct {
	Now      time.Time
	Asked    Asked
	Postgres Postgres
	// Redis is the memory of Redis.
	Redis Memory
	// Refused is what Redis refuses to this process' user, although publishing needs it; "" if nothing is known.
	Refused string
	// NATS reports whether events are published to NATS. Then Asked.Redis has the answers of NATS.
	NATS bool
	// Relay is the health of this process' relay; nil in a process without one.
	Relay *relay.Health
	// WALBudget is how many bytes of WAL the slot may hold back; 0 if that is unknown.
	WALBudget int64
	Dead      DeadCount
	Groups    []sink.Group
	// Lost is when the console noticed that Redis has lost data; nil if it did not.
	Lost *time.Time
	// Streams is the number of streams, Looked how many of them are read at most; 0 for all.
	Streams, Looked int
	// Fresh is the largest age of an answer of Postgres or Redis that counts as current; 0 for any age.
	Fresh time.Duration
}

// Asked has the state of each source's answers. Dead, Groups and Streams may fail although both servers answer.
type Asked struct{ Postgres, Redis, Dead, Groups, Streams Answer }

// Answer is the state of a source's answers. The zero value means that it was not queried, or has not answered yet.
type Answer struct {
	// AsOf is when the last answer was true; nil if there was none.
	AsOf *time.Time `json:"as_of"`
	// Error is that of the last query, "" if it succeeded. Since is when queries began to fail, Well when they began
	// to succeed.
	Error string     `json:"error,omitempty"`
	Since *time.Time `json:"since,omitempty"`
	Well  time.Time  `json:"-"`
	// Refused: the server answered with that error. Slow: the server is there, but the query timed out.
	Refused bool `json:"refused,omitempty"`
	Slow    bool `json:"slow,omitempty"`
}

// known reports whether there is an answer and the last query succeeded.
func (a Answer) known() bool { return a.AsOf != nil && a.Error == "" }

// open reports whether nothing is known: neither an answer nor an error.
func (a Answer) open() bool { return a.AsOf == nil && a.Error == "" }

// Postgres is the state of the pipeline in Postgres.
type Postgres struct {
	Status
	// Written is how many sequence numbers events have taken. Led reports whether a relay leads, Relays is how many
	// are connected: 0 if this role may not see them.
	Written int64 `json:"written"`
	Led     bool  `json:"led"`
	Relays  int   `json:"relays"`
	// Hung reports whether commits wait for a synchronous standby.
	Hung bool `json:"hung,omitempty"`
}

// Memory is the memory of Redis. A Policy of "" is unknown.
type Memory struct {
	UsedBytes int64  `json:"used_bytes"`
	MaxBytes  int64  `json:"max_bytes"` // 0: no limit
	Policy    string `json:"policy"`
}

// Source reads single snapshots. (The console, which reads repeatedly, only uses ReadPostgres.)
type Source struct {
	Pool      *pgxpool.Pool
	RelayName string
	Slots     outbox.Slots
	// Relay is the relay of this process, or nil. It knows the state of Redis, or with NATS set of NATS; without a
	// relay, Redis is called, unless it is nil.
	Relay *relay.Relay
	NATS  bool
	Redis func(ctx context.Context) error
	// Permitted, if not nil, is called when events are late. It returns what the server refuses to this process' user
	// although publishing to streams needs it.
	Permitted func(ctx context.Context, streams []string) error
	WALBudget int64
	// Most is how many waiting events are counted at most, which bounds the cost of a snapshot; 0: all.
	Most int64
}

// redisTimeout bounds the query to Redis: a server that hangs must not delay the answer of Postgres.
const redisTimeout = 2 * time.Second

// ReadPostgres reads the status, and the relays that hold locks.
func (s Source) ReadPostgres(ctx context.Context) (Postgres, error) {
	st, err := s.readStatus(ctx)
	if err != nil {
		return Postgres{}, err
	}
	pulse, err := sql.ReadPulse(ctx, s.Pool)
	if sql.Denied(err) {
		pulse, err = sql.Pulse{Led: true}, nil // this role may not see locks, so it cannot tell
	}
	return Postgres{Status: st, Written: pulse.Written, Led: pulse.Led, Relays: pulse.Relays, Hung: pulse.Hung}, err
}

// Look reads a snapshot. It returns the error of Postgres; the error of Redis is in the snapshot.
func (s Source) Look(ctx context.Context) (*Snapshot, error) {
	asked := make(chan Answer, 1)
	go func() { asked <- s.askRedis(ctx) }()
	p, err := s.ReadPostgres(ctx)
	var dead []Dead
	if err == nil && p.Dead > 0 {
		dead, err = ListDead(ctx, s.Pool)
	}
	redis := <-asked
	if err != nil {
		return nil, err
	}
	snap := &Snapshot{
		Now: time.Now(), Postgres: p, NATS: s.NATS, WALBudget: s.WALBudget, Dead: CountDead(dead, p.Dead, 0),
	}
	snap.Asked.Postgres, snap.Asked.Redis = Answer{AsOf: &snap.Now}, redis
	if s.Relay != nil {
		h := s.Relay.Health()
		snap.Relay = &h
	}
	if s.Permitted != nil && redis.Error == "" && seconds(p.Backlog.OldestSeconds) >= lateAfter {
		snap.Refused = s.refused(ctx)
	}
	return snap, nil
}

func (s Source) refused(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	streams, err := sql.Streams(ctx, s.Pool)
	if err == nil {
		err = s.Permitted(ctx, streams)
	}
	if sink.Class(err) != "noperm" {
		return "" // events may be late for any other reason
	}
	return OneLine(err)
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
		return Answer{Error: OneLine(err)}
	}
	return Answer{AsOf: &now}
}

// redisOf is the state of Redis, or NATS, according to a relay, which queries it every second.
func redisOf(h relay.Health, now time.Time) Answer {
	for _, reason := range h.Reasons {
		if name, why, _ := strings.Cut(reason, ": "); name == "redis" || name == "nats" {
			return Answer{Error: why}
		}
	}
	return Answer{AsOf: &now}
}

// DeadCount counts dead events: Relay and Groups those that wait for an operator, Retrying those being retried.
type DeadCount struct {
	Relay    int `json:"relay"`
	Groups   int `json:"groups"`
	Retrying int `json:"retrying"`
	// First is the reason of the oldest dead event that waits for an operator.
	First string `json:"first"`
}

// CountDead counts dead events. list has the first ones; relay and groups are the totals.
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
