package ops

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/statement"
	"posthaste/sql"
)

// Dead is one parked event.
type Dead struct {
	// Source is "relay", or the name of the consumer group.
	Source        string    `json:"source"`
	ID            uuid.UUID `json:"id"`
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	Type          string    `json:"type"`
	Class         string    `json:"class"`
	Error         string    `json:"error"`
	Attempts      int       `json:"attempts"`
	CreatedAt     time.Time `json:"created_at"`
	DeadAt        time.Time `json:"dead_at"`
	Retrying      bool      `json:"retrying"`
}

// listLimit bounds a list of parked events.
const listLimit = 1000

// ListDead returns the relay's parked events, oldest first, at most 1,000.
func ListDead(ctx context.Context, db sql.DB) ([]Dead, error) {
	list, err := sql.ListDead(ctx, db, listLimit)
	if err != nil {
		return nil, err
	}
	out := make([]Dead, len(list))
	for i, d := range list {
		out[i] = Dead{
			Source: sourceRelay, ID: d.ID, AggregateType: d.AggregateType, AggregateID: d.AggregateID, Type: d.Type,
			Class: d.Class, Error: d.Error, Attempts: d.Attempts, CreatedAt: d.CreatedAt, DeadAt: d.DeadAt,
			Retrying: d.Retrying,
		}
	}
	return out, nil
}

// sourceRelay is the source of events that the relay has parked.
const sourceRelay = "relay"

// GroupDead converts a dead event of a consumer group to the form of the relay's. bases has the base of each stream,
// as outbox.Bases returns it: a type may have several streams.
func GroupDead(g consumer.DeadEntry, prefix string, bases map[string]string) Dead {
	id, _ := uuid.Parse(g.EventID) // a malformed entry has none
	created := g.Time
	if created.IsZero() {
		created = g.At
	}
	return Dead{
		Source: g.Group, ID: id, AggregateType: strings.TrimPrefix(cmp.Or(bases[g.Stream], g.Stream), prefix),
		AggregateID: g.Subject, Type: g.Type, Class: "consumer",
		Error: g.Error, Attempts: g.Attempts, CreatedAt: created, DeadAt: g.At,
	}
}

// DeadDetail is everything about a dead event.
type DeadDetail struct {
	Dead

	// Stream is the event's stream, "" if the relay has published nothing yet. Entry is the event's entry in it, and is
	// empty if the relay gave the event up.
	Stream string `json:"stream"`
	Entry  string `json:"entry_id,omitempty"`
	// Headers are the names of the headers.
	Headers []string `json:"headers"`
	// PayloadBytes is -1 if the event's row could not be read. Payload is set on request only.
	PayloadBytes int             `json:"payload_bytes"`
	Payload      json.RawMessage `json:"payload,omitempty"`
	// Remedy lists the commands that apply.
	Remedy []string `json:"remedy" db:"-"`
}

// ShowDead returns what the relay and each group have about the dead event with the id, with its payload if payload is
// set; nothing if the event is not dead.
func (d *DeadIn) ShowDead(
	ctx context.Context, id, prefix string, bases map[string]string, payload bool,
) ([]DeadDetail, error) {
	event, _ := uuid.Parse(id) // the id of a malformed entry may be any text
	list, err := statement.Structs[DeadDetail](ctx, d.Pool, "show dead event", query("dead_show"), event, payload)
	if err != nil {
		return nil, err
	}
	for _, g := range d.Groups {
		if !strings.EqualFold(g.EventID, id) {
			continue
		}
		found, err := d.Client.XRange(ctx, g.DeadStream, g.DeadID, g.DeadID).Result()
		if err != nil {
			return list, err
		}
		if len(found) == 0 {
			continue // retried or dropped since it was listed
		}
		text := func(name string) string { s, _ := found[0].Values[name].(string); return s }
		one := DeadDetail{
			Dead: GroupDead(g, prefix, bases), Stream: g.Stream, Entry: g.EntryID, PayloadBytes: len(text("data")),
		}
		var headers map[string]json.RawMessage
		_ = json.Unmarshal([]byte(text("headers")), &headers) // an entry without headers has no such field
		one.Headers = slices.AppendSeq([]string{}, maps.Keys(headers))
		slices.Sort(one.Headers)
		if payload && json.Valid([]byte(text("data"))) {
			one.Payload = json.RawMessage(text("data"))
		}
		list = append(list, one)
	}
	for i := range list {
		switch one := &list[i]; {
		case one.Retrying:
			one.Remedy = []string{"posthaste trace " + id}
		case one.PayloadBytes < 0:
			one.Remedy = []string{"posthaste dead drop " + id}
		default:
			one.Remedy = []string{"posthaste dead retry " + id, "posthaste dead drop " + id}
		}
	}
	return list, nil
}

// GroupsDead lists the dead events of consumer groups on the streams with the prefix, without payloads, which might
// not fit into memory. It returns what it could read together with the error.
func GroupsDead(ctx context.Context, client redis.UniversalClient, prefix string) ([]consumer.DeadEntry, error) {
	found, err := consumer.Streams(ctx, client, prefix)
	var streams []string
	for _, name := range found {
		if stream, ok := strings.CutPrefix(name, "dead."); ok {
			streams = append(streams, stream)
		}
	}
	list, _, unread := consumer.DeadHeads(ctx, client, streams, math.MaxInt)
	return list, errors.Join(err, unread)
}

type DeadAction struct {
	// Done describes the result for an event.
	Done string
	// Relay acts on an event that the relay has parked, Group on one that a consumer group has given up.
	Relay func(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error
	Group func(ctx context.Context, client redis.UniversalClient, d consumer.DeadEntry) error
}

// RetryDead publishes an event again, or returns it to its group.
func RetryDead() DeadAction {
	return DeadAction{Done: "is on its way again", Relay: sql.RetryDead, Group: consumer.Retry}
}

// DropDead removes an event for good.
func DropDead() DeadAction {
	return DeadAction{
		Done:  "is dropped",
		Relay: func(ctx context.Context, pool *pgxpool.Pool, id uuid.UUID) error { return sql.DropDead(ctx, pool, id) },
		Group: consumer.Drop,
	}
}

// DeadIn has the places of dead events: the relay's are in Postgres, the groups' in Redis.
type DeadIn struct {
	Pool   *pgxpool.Pool
	Client redis.UniversalClient
	// Groups are the dead events of consumer groups, as they were read.
	Groups []consumer.DeadEntry
	// Source limits an action to the relay ("relay") or a group; "" does not.
	Source string
	// Limit bounds the action on each event; 0 does not.
	Limit time.Duration
}

// DeadName describes a dead event in messages.
func DeadName(id, source string) string {
	if source == sourceRelay {
		return id
	}
	return id + " (group " + source + ")"
}

// Each applies a to the events with the ids, or to all, and calls said with the result for each: the event's id, its
// source as in Dead, and an error or nil. It returns an error that prevented the start, or that of ctx, which it
// checks between two events.
func (d *DeadIn) Each(
	ctx context.Context, a DeadAction, ids []uuid.UUID, all bool, said func(id, source string, err error),
) error {
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id.String()] = true
	}
	if all {
		var err error
		if ids, err = sql.DeadIDs(ctx, d.Pool); err != nil {
			return err
		}
	}
	handled := map[string]bool{}
	for _, g := range d.Groups {
		if err := ctx.Err(); err != nil {
			return err
		}
		id := strings.ToLower(g.EventID)
		if (all || wanted[id]) && (d.Source == "" || d.Source == g.Group) {
			handled[id] = true
			err := d.limited(ctx, func(ctx context.Context) error { return a.Group(ctx, d.Client, g) })
			said(g.EventID, g.Group, err)
		}
	}
	if d.Source != "" && d.Source != sourceRelay {
		return nil
	}
	for _, id := range ids {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := d.limited(ctx, func(ctx context.Context) error { return a.Relay(ctx, d.Pool, id) })
		if errors.Is(err, sql.ErrNotParked) && (handled[id.String()] || all) {
			continue // only a group had it, or it was removed since it was listed
		}
		said(id.String(), sourceRelay, err)
	}
	return nil
}

func (d *DeadIn) limited(ctx context.Context, act func(ctx context.Context) error) error {
	if d.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d.Limit)
		defer cancel()
	}
	return act(ctx)
}
