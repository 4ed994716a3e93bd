package outbox

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
)

// Partitions is the number of parts the outbox table is divided into by a hash of the aggregate id. All events of one
// aggregate are in one part, so claiming a part keeps their order.
const Partitions = 16

// MaxPayload is the longest payload, in bytes of its JSON text, that the outbox table accepts.
const MaxPayload = 8 << 20

// Record is one row of the outbox table on its way to a stream. It is immutable once a source has handed it out.
type Record struct {
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
func (e *Record) Size() int {
	return rowOverhead + len(e.AggregateType) + len(e.AggregateID) + len(e.Type) + len(e.Payload) + len(e.Headers)
}

// TraceParent returns the W3C trace context the writer left in the headers, or "". It counts only if it is a string of
// at most 128 bytes, without escapes.
func (e *Record) TraceParent() string {
	_, colon, end := traceMember(e.Headers)
	return traceText(e.Headers[colon:end])
}

// SplitHeaders returns TraceParent, and the object of all other headers, or nil without any. Headers that are not
// an object have neither.
func (e *Record) SplitHeaders() (traceParent string, others []byte) {
	h := e.Headers
	if !isObject(h) {
		return "", nil
	}
	begin, colon, end := traceMember(h)
	traceParent = traceText(h[colon:end])
	switch {
	case end == 0:
		return "", h
	case h[end] == ',':
		begin += bytes.IndexByte(h[begin:], '"')
		return traceParent, slices.Concat(h[:begin], bytes.TrimLeft(h[end+1:], " "))
	case h[begin-1] == ',':
		return traceParent, slices.Concat(h[:begin-1], h[end:])
	}
	return traceParent, nil
}

// isObject reports whether headers are an object with a member.
func isObject(h []byte) bool { return len(h) > len("{}") && h[0] == '{' }

// traceMember returns where the traceparent is in headers: see member.
func traceMember(h []byte) (begin, colon, end int) {
	if !isObject(h) {
		return 0, 0, 0
	}
	return member(h, []byte(`"traceparent"`))
}

// traceText returns the trace context in the value of a member, which begins with its colon.
func traceText(member []byte) string {
	v := bytes.TrimSpace(bytes.TrimPrefix(member, []byte(":")))
	if len(v) > len(`""`) && len(v) <= 130 && v[0] == '"' && bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1])
	}
	return ""
}

// member returns where the member of an object in JSON whose name in quotes is key begins, where its colon is, and
// where the comma or brace after it is: 0 if there is no such member.
func member(h, key []byte) (begin, colon, end int) {
	if !bytes.Contains(h, key) {
		return 0, 0, 0
	}
	depth := 0
	for i := 0; i < len(h); i++ {
		switch h[i] {
		case '"':
			for i++; i < len(h) && h[i] != '"'; i++ {
				if h[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			if depth++; depth == 1 {
				begin = i + 1
			}
		case ':':
			if depth == 1 {
				colon = i
			}
		case ',', '}', ']':
			if depth == 1 {
				if colon > begin && bytes.Equal(bytes.TrimSpace(h[begin:colon]), key) {
					return begin, colon, i
				}
				begin = i + 1
			}
			if h[i] != ',' {
				depth--
			}
		}
	}
	return 0, 0, 0
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
	Record
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
