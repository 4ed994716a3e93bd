package cdc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"

	"posthaste/outbox"
)

// decoded is the kind of a message.
type decoded uint8

const (
	// nothing: metadata, or a change that is not an insert into the outbox.
	nothing decoded = iota
	// announced: the columns of the outbox table, ahead of its first row and of the first one after a change.
	announced
	// began: a transaction starts; its changes follow. Only committed transactions are sent.
	began
	// inserted: decoder.row is the next row of the transaction.
	inserted
	// committed: the transaction is complete; decoder.end is the LSN behind its commit record.
	committed
)

// decoder reads pgoutput messages, protocol 1, text mode. It is pure: no I/O, no clock. Nothing it returns aliases its
// input. One decoder belongs to one connection, because the server announces relations per connection.
type decoder struct {
	schema, table string
	relations     map[uint32]*relation
	names         interner

	// open is set between BEGIN and COMMIT, and with it commit, at and xid.
	open   bool
	commit outbox.LSN
	at     time.Time
	xid    uint32
	// end is valid after committed, row after inserted; both until the next call.
	end outbox.LSN
	row outbox.Row
}

func newDecoder(schema, table string) *decoder {
	return &decoder{schema: schema, table: table, relations: map[uint32]*relation{}, names: interner{}}
}

// decode reads one message. Every error is an *outbox.SlotError with ReasonDecode and ends the connection, because
// messages after one that cannot be decoded are unreliable.
func (d *decoder) decode(msg []byte) (decoded, error) {
	if len(msg) == 0 {
		return nothing, undecodable(errors.New("empty message"))
	}
	c := cursor{b: msg[1:]}
	what, err := d.message(pglogrepl.MessageType(msg[0]), &c)
	if err == nil && c.short {
		err = errors.New("message is cut short")
	}
	if err == nil && len(c.b) != 0 {
		err = fmt.Errorf("%d bytes too many", len(c.b))
	}
	if err != nil {
		return nothing, undecodable(fmt.Errorf("pgoutput message %q: %w", msg[0], err))
	}
	return what, nil
}

func undecodable(err error) error { return slotError(outbox.ReasonDecode, err) }

func (d *decoder) message(kind pglogrepl.MessageType, c *cursor) (decoded, error) {
	switch kind {
	case pglogrepl.MessageTypeInsert:
		return d.insert(c)
	case pglogrepl.MessageTypeBegin:
		return d.begin(c)
	case pglogrepl.MessageTypeCommit:
		return d.finish(c)
	case pglogrepl.MessageTypeRelation:
		return d.relation(c)
	case pglogrepl.MessageTypeUpdate, pglogrepl.MessageTypeDelete, pglogrepl.MessageTypeTruncate,
		pglogrepl.MessageTypeOrigin, pglogrepl.MessageTypeType, pglogrepl.MessageTypeMessage,
		// Protocol 1 has no aborts, but servers have been reported to send one.
		pglogrepl.MessageTypeStreamAbort:
		c.b = nil
		return nothing, nil
	default:
		return nothing, errors.New("not part of protocol 1")
	}
}

func (d *decoder) begin(c *cursor) (decoded, error) {
	final, at, xid := c.u64(), c.u64(), c.u32()
	if c.short {
		return nothing, nil
	}
	if d.open {
		return nothing, fmt.Errorf("transaction %d begins inside transaction %d", xid, d.xid)
	}
	if final == 0 {
		return nothing, errors.New("transaction without a commit position")
	}
	d.open, d.commit, d.at, d.xid = true, outbox.LSN(final), pgTime(at), xid
	return began, nil
}

func (d *decoder) finish(c *cursor) (decoded, error) {
	_, commit, end, _ := c.u8(), outbox.LSN(c.u64()), outbox.LSN(c.u64()), c.u64()
	if c.short {
		return nothing, nil
	}
	if !d.open || commit != d.commit || end <= commit {
		return nothing, fmt.Errorf("commit at %s (end %s) does not belong to the transaction at %s", commit, end,
			d.commit)
	}
	d.open, d.end = false, end
	return committed, nil
}

// insert reads an INSERT: relation, 'N', tuple.
func (d *decoder) insert(c *cursor) (decoded, error) {
	oid, tag := c.u32(), c.u8()
	if c.short {
		return nothing, nil
	}
	rel, ok := d.relations[oid]
	switch {
	case !ok:
		return nothing, fmt.Errorf("insert into relation %d, which was not announced", oid)
	case rel == nil: // another table of the publication
		c.b = nil
		return nothing, nil
	case tag != 'N':
		return nothing, fmt.Errorf("tuple tag %q", tag)
	case !d.open:
		return nothing, errors.New("row outside a transaction")
	}
	var v values
	if err := rel.tuple(c, &v); err != nil || c.short {
		return nothing, err
	}
	if err := d.fill(&v); err != nil {
		return nothing, err
	}
	return inserted, nil
}

// fill makes d.row from the tuple. The variable parts are copied out of the receive buffer here and nowhere else: the
// two JSON documents into one allocation, the names into shared strings.
func (d *decoder) fill(v *values) error {
	id, err := parseUUID(v[colID])
	if err != nil {
		return err
	}
	seq, err := strconv.ParseInt(string(v[colSeq]), 10, 64)
	if err != nil {
		return errors.New("seq is not a number")
	}
	switch {
	case id == uuid.Nil && seq == 0: // would read as a marker
		return errors.New("row has neither an id nor a number")
	case len(v[colAggregateType]) == 0:
		return fmt.Errorf("row %d has an empty aggregate_type", seq)
	case len(v[colPayload]) == 0:
		return fmt.Errorf("row %d has an empty payload", seq)
	}
	p, h := len(v[colPayload]), len(v[colHeaders])
	docs := make([]byte, p+h)
	copy(docs, v[colPayload])
	copy(docs[p:], v[colHeaders])
	d.row = outbox.Row{
		Record: outbox.Record{
			ID: id, Seq: seq,
			AggregateType: d.names.get(v[colAggregateType]),
			AggregateID:   string(v[colAggregateID]),
			Type:          d.names.get(v[colEventType]),
			Payload:       docs[:p:p],
			Time:          d.at,
		},
		Commit: d.commit, XID: d.xid,
	}
	if v[colHeaders] != nil {
		d.row.Headers = docs[p:]
	}
	return nil
}

// cursor reads a message. A read past the end sets short and yields zeros.
type cursor struct {
	b     []byte
	short bool
}

func (c *cursor) take(n int) []byte {
	if n < 0 || n > len(c.b) {
		c.short, c.b = true, nil
		return nil
	}
	v := c.b[:n:n]
	c.b = c.b[n:]
	return v
}

func (c *cursor) u8() byte {
	if v := c.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (c *cursor) u16() uint16 {
	if v := c.take(2); v != nil {
		return binary.BigEndian.Uint16(v)
	}
	return 0
}

func (c *cursor) u32() uint32 {
	if v := c.take(4); v != nil {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

func (c *cursor) u64() uint64 {
	if v := c.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

// cstring reads up to a NUL. The result aliases the message.
func (c *cursor) cstring() []byte {
	for i, b := range c.b {
		if b == 0 {
			v := c.b[:i:i]
			c.b = c.b[i+1:]
			return v
		}
	}
	c.short, c.b = true, nil
	return nil
}

// interner shares the strings that repeat from row to row. It is bounded: a database may have any number of them.
type interner map[string]string

const internMax = 512

func (in interner) get(b []byte) string {
	if s, ok := in[string(b)]; ok {
		return s
	}
	s := string(b)
	if len(in) < internMax {
		in[s] = s
	}
	return s
}

// y2k is the zero of Postgres' clock, in microseconds of Unix time.
const y2k = 946684800 * 1_000_000

func pgTime(micros uint64) time.Time {
	t := int64(micros) //nolint:gosec // the wire carries a signed number
	if t > math.MaxInt64-y2k {
		return time.Time{}
	}
	return time.UnixMicro(t + y2k).UTC()
}

// parseUUID takes the canonical form only, which is what the server prints.
func parseUUID(b []byte) (uuid.UUID, error) {
	if len(b) != 36 {
		return uuid.Nil, errors.New("id is not a UUID")
	}
	id, err := uuid.ParseBytes(b)
	if err != nil {
		return uuid.Nil, errors.New("id is not a UUID")
	}
	return id, nil
}
