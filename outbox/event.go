package outbox

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// Partitions is the number of parts the outbox table is divided into by a hash of the aggregate id. All events of one
// aggregate are in one part, so claiming a part keeps their order.
const Partitions = 16

// MaxPayload is the longest payload, in bytes of its JSON text, that the outbox table accepts.
const MaxPayload = 8 << 20

// Event is one row of the outbox table on its way to a stream. It is immutable once a source has handed it out.
type Event struct {
	// ID is the event's identity, chosen by the writer and unique in the table.
	ID uuid.UUID
	// Seq is the row's number in the table: the key, with the part, under which it is settled.
	Seq int64
	// AggregateType selects the stream.
	AggregateType string
	// AggregateID is the stream entry's subject; events that share it keep their order.
	AggregateID string
	// Type is the event's name, and the Pub/Sub channel.
	Type string
	// Payload is the event's body as JSON text.
	Payload []byte
	// Headers is a JSON object, or nil.
	Headers []byte
	// Time is what the stream entry calls time: the commit time when streamed, the insert time when swept.
	Time time.Time
}

// rowOverhead is the size of an event without its variable parts: the struct, its place in queues, an entry id.
const rowOverhead = 256

// Size returns the bytes with which the event counts against windows and batches.
func (e *Event) Size() int {
	return rowOverhead + len(e.AggregateType) + len(e.AggregateID) + len(e.Type) + len(e.Payload) + len(e.Headers)
}

// TraceParent returns the W3C trace context the writer left in the headers, or "".
func (e *Event) TraceParent() string {
	if len(e.Headers) == 0 {
		return ""
	}
	var h struct {
		TraceParent string `json:"traceparent"`
	}
	// Headers that are not an object with a string in that place simply carry no trace context.
	if json.Unmarshal(e.Headers, &h) != nil || len(h.TraceParent) > 128 {
		return ""
	}
	return h.TraceParent
}

// EntrySource returns the source field of the entries of a database, by the name of its relay. It distinguishes
// databases that share streams.
func EntrySource(relayName string) string { return "/posthaste/" + relayName }

// LSN is a position in the write-ahead log.
type LSN uint64

// String returns the position as Postgres writes it, for example 0/16B3748.
func (l LSN) String() string { return fmt.Sprintf("%X/%X", uint32(l>>32), uint32(l)) } //nolint:gosec // two halves

// ParseLSN reads the text form of a position.
func ParseLSN(s string) (LSN, error) {
	var hi, lo uint32
	if n, err := fmt.Sscanf(s, "%X/%X", &hi, &lo); err != nil || n != 2 {
		return 0, fmt.Errorf("parse LSN %q", s)
	}
	return LSN(hi)<<32 | LSN(lo), nil
}

// Row is an event as the replication stream delivers it.
type Row struct {
	Event
	// Commit is the LSN of the transaction's commit record (BEGIN's final LSN).
	Commit LSN
	// XID is the transaction's 32-bit id.
	XID uint32
	// End is the LSN after the commit record, set on the last row of a transaction and zero on the others. A row with a
	// zero ID and an End is only a marker: the rows of its transaction were delivered before, or it had no rows.
	End LSN
}

// Marker reports whether the row carries no event, only the end of a transaction.
func (r *Row) Marker() bool { return r.ID == uuid.Nil && r.Seq == 0 }

// Chunk is what a Source delivers at once, in commit order. The receiver owns it.
type Chunk struct {
	Rows []Row
	// Bytes is the sum of the rows' sizes.
	Bytes int
	// Position means that everything committed below it and not in Rows was delivered before. Zero means nothing.
	Position LSN
}
