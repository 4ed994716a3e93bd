package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Event is one stream entry as the handler sees it.
type Event struct {
	// ID is the event's identity, the same in every delivery and every stream: the key to deduplicate by.
	ID string
	// Type is the event's name, for example order.created.
	Type string
	// Source is /posthaste/<relay name>.
	Source string
	// Subject is the aggregate's id. Events of one subject run in order; an empty one has no order.
	Subject string
	// Time is when the event was committed; zero if the entry does not say.
	Time time.Time
	// Data is the payload as it was published. It is not validated; see JSON for a handler that decodes it.
	Data json.RawMessage
	// TraceParent is the W3C trace context of the writer, or "". The handler's context has it too: TraceParent(ctx).
	TraceParent string
	// Headers are the writer's other headers by name; nil without any. A value that is not a string is its JSON
	// text.
	Headers map[string]string
	// Replayed is set on an event that was published again on purpose.
	Replayed bool
	// Stream and EntryID say where the event was read.
	Stream, EntryID string
	// Attempt is 1 for the first delivery, and higher when the event was, or may have been, tried before.
	Attempt int
	// headers is the entry's field.
	headers string
}

// Handler processes one event. nil acknowledges it; an error is retried. ctx ends when the drain timeout of an orderly
// stop has passed.
type Handler func(ctx context.Context, ev Event) error

// Middleware wraps a handler, for logging, tracing, timeouts and the like.
type Middleware func(Handler) Handler

// JSON returns a handler that decodes the payload into a T before it calls fn. A payload that does not decode is
// Permanent: retrying cannot help.
func JSON[T any](fn func(ctx context.Context, ev Event, body T) error) Handler {
	return func(ctx context.Context, ev Event) error {
		var body T
		if err := json.Unmarshal(ev.Data, &body); err != nil {
			return Permanent(fmt.Errorf("decode the payload of event %s: %w", ev.ID, err))
		}
		return fn(ctx, ev, body)
	}
}

type traceKey struct{}

// TraceParent returns the W3C trace context (the text of a traceparent header) of the event that the context belongs
// to, or "". With OpenTelemetry:
//
//	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": consumer.TraceParent(ctx)})
func TraceParent(ctx context.Context) string {
	s, _ := ctx.Value(traceKey{}).(string)
	return s
}

// errMalformed says that an entry is not an event.
var errMalformed = errors.New("malformed entry: no event id")

// decode makes an event of a stream entry. Only the id is indispensable.
func decode(stream string, m redis.XMessage, attempt int) (Event, error) {
	field := func(name string) string { return text(m.Values[name]) }
	ev := Event{
		ID: field("id"), Type: field("type"), Source: field("source"), Subject: field("subject"),
		Data: json.RawMessage(field("data")), TraceParent: field("traceparent"), Replayed: field("replayed") == "1",
		Stream: stream, EntryID: m.ID, Attempt: attempt, headers: field("headers"),
	}
	ev.Headers = headersOf(ev.headers)
	if t, err := time.Parse(time.RFC3339Nano, field("time")); err == nil {
		ev.Time = t.UTC()
	}
	if ev.ID == "" {
		return ev, errMalformed
	}
	return ev, nil
}

// headersOf reads the field headers. Text that is not an object has no headers.
func headersOf(field string) map[string]string {
	var values map[string]json.RawMessage
	if field == "" || json.Unmarshal([]byte(field), &values) != nil || len(values) == 0 {
		return nil
	}
	headers := make(map[string]string, len(values))
	for name, v := range values {
		var s string
		if v[0] != '"' || json.Unmarshal(v, &s) != nil {
			s = string(v)
		}
		headers[name] = s
	}
	return headers
}

// entryID is a stream entry's id in comparable form.
type entryID struct{ ms, seq uint64 }

func parseEntryID(s string) entryID {
	ms, seq, _ := strings.Cut(s, "-")
	var id entryID
	// Redis wrote it; anything that does not parse sorts first.
	id.ms, _ = strconv.ParseUint(ms, 10, 64)
	id.seq, _ = strconv.ParseUint(seq, 10, 64)
	return id
}
