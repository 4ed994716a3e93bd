package sink

import (
	"bytes"
	"context"
	"encoding"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"posthaste/internal/redisurl"
	"posthaste/outbox"
)

// headLen is the length of an event's arguments of fixed width: its id in bytes, its id as text and its time.
const headLen = 16 + 36 + 27

// Indexes of the arguments of publish.lua, counted from evalsha.
const (
	argNumber   = 11
	argOf       = 12
	argSettled  = 13
	argLet      = 14
	argIDs      = 15
	argHeads    = 16
	argPubSub   = 18
	argExtended = 19
	argEvents   = 21
)

// call holds the arguments of a lane's script calls. Batches share its memory, and it refers to the events instead of
// copying them: a batch of a thousand events costs a few allocations.
type call struct {
	args    []any
	ids     []byte
	heads   []byte
	traces  []string
	headers []object
	pubsub  bool
}

func newCall(s *Sink, stream string, o outbox.Owner, l outbox.Lane) call {
	args := append([]any{"evalsha", publishScript.sha}, gateArgs(stream, o)...)
	args = append(args, l.Name(), l.Claim, l.Nonce.String())
	args = append(args, nil, nil, nil, nil, nil, nil, s.o.Source, nil, nil, s.o.ChannelPrefix)
	// Subscribers of a channel have already received restored events.
	return call{args: args, pubsub: s.o.PubSub && l.Part != outbox.RestoreLane}
}

// encode returns the arguments that publish events under number; the batches of the claim of up to settled are settled.
// They are valid until the next call.
func (c *call) encode(number, of, settled, let int64, events []*outbox.Record) []any {
	c.ids, c.heads = slices.Grow(c.ids[:0], 16*len(events)), slices.Grow(c.heads[:0], headLen*len(events))
	c.traces, c.headers = slices.Grow(c.traces[:0], len(events)), slices.Grow(c.headers[:0], len(events))
	extended := false
	for _, e := range events {
		c.ids = append(c.ids, e.ID[:]...)
		c.heads = appendHead(c.heads, e)
		t, h := e.SplitHeaders()
		extended = extended || t != "" || h != nil
		c.traces, c.headers = append(c.traces, t), append(c.headers, h)
	}
	each := 3
	if extended {
		each = 5
	}
	args := slices.Grow(c.args[:argEvents], each*len(events))
	args[argPubSub] = c.announced(events)
	args[argNumber], args[argOf], args[argSettled], args[argLet] = number, of, settled, let
	args[argIDs], args[argHeads], args[argExtended] = c.ids, c.heads, "0"
	if extended {
		args[argExtended] = "1"
	}
	for i, e := range events {
		args = append(args, &e.Type, &e.AggregateID, (*payload)(e))
		if extended {
			args = append(args, &c.traces[i], &c.headers[i])
		}
	}
	c.args = args
	return args
}

// width is the largest number of arguments that each event may have in a call for events.
func width(events []*outbox.Record) int {
	if slices.ContainsFunc(events, func(e *outbox.Record) bool { return len(e.Headers) > 0 }) {
		return 5
	}
	return 3
}

// announced returns which events are also published on a channel: "" for none, "1" for all, otherwise a digit for each.
func (c *call) announced(events []*outbox.Record) string {
	if !c.pubsub {
		return ""
	}
	reserved := func(e *outbox.Record) bool { return strings.HasPrefix(e.Type, "__") }
	if !slices.ContainsFunc(events, reserved) {
		return "1"
	}
	digits := bytes.Repeat([]byte{'1'}, len(events))
	for i, e := range events {
		if reserved(e) {
			digits[i] = '0'
		}
	}
	return string(digits)
}

// release drops the references to the events.
func (c *call) release() {
	clear(c.args[argEvents:])
	clear(c.headers)
	c.args = c.args[:argEvents]
}

// payload passes an event's body to the client, and object its headers. A pointer needs no allocation; a slice would.
type (
	payload outbox.Record
	object  []byte
)

var _, _ encoding.BinaryMarshaler = (*payload)(nil), (*object)(nil)

// MarshalBinary implements encoding.BinaryMarshaler.
func (p *payload) MarshalBinary() ([]byte, error) { return p.Payload, nil }

// MarshalBinary implements encoding.BinaryMarshaler.
func (o *object) MarshalBinary() ([]byte, error) { return *o, nil }

var (
	firstTime = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)
)

// appendHead appends the parts of fixed width. A time whose year has more than four digits becomes the nearest time
// with four.
func appendHead(b []byte, e *outbox.Record) []byte {
	var id [36]byte
	hex.Encode(id[:8], e.ID[:4])
	hex.Encode(id[9:13], e.ID[4:6])
	hex.Encode(id[14:18], e.ID[6:8])
	hex.Encode(id[19:23], e.ID[8:10])
	hex.Encode(id[24:], e.ID[10:])
	id[8], id[13], id[18], id[23] = '-', '-', '-', '-'
	b = append(b, id[:]...)
	t := e.Time.UTC()
	if t.Before(firstTime) {
		t = firstTime
	} else if t.After(lastTime) {
		t = lastTime
	}
	year, month, day := t.Date()
	hour, minute, second := t.Clock()
	b = append(appendDigits(b, year, 4), '-')
	b = append(appendDigits(b, int(month), 2), '-')
	b = append(appendDigits(b, day, 2), 'T')
	b = append(appendDigits(b, hour, 2), ':')
	b = append(appendDigits(b, minute, 2), ':')
	b = append(appendDigits(b, second, 2), '.')
	return append(appendDigits(b, t.Nanosecond()/1000, 6), 'Z')
}

// appendDigits appends the last n decimal digits of v.
func appendDigits(b []byte, v, n int) []byte {
	b = append(b, "000000"[:n]...)
	for i := len(b) - 1; v > 0; i-- {
		b[i] = byte('0' + v%10)
		v /= 10
	}
	return b
}

// wireSize returns the size of a call in the protocol, in bytes.
func wireSize(args []any) int64 {
	size := 3 + digits(len(args))
	for _, a := range args {
		n := 0
		switch v := a.(type) {
		case string:
			n = len(v)
		case *string:
			n = len(*v)
		case []byte:
			n = len(v)
		case *payload:
			n = len(v.Payload)
		case *object:
			n = len(*v)
		case int:
			n = digits(v)
		case int64:
			n = digits(int(v))
		}
		size += n + 5 + digits(n)
	}
	return int64(size)
}

func digits(n int) int { return len(strconv.Itoa(n)) }

// serverLimits are the largest sizes that the server accepts, in bytes; 0 is unknown.
type serverLimits struct {
	// bulk bounds one argument, query one command.
	bulk, query int64
}

// exceeded returns which limit a command of size bytes with a payload of length bytes exceeds, "" if none.
func (l serverLimits) exceeded(size int64, length int) string {
	switch {
	case l.bulk > 0 && int64(length) > l.bulk:
		return fmt.Sprintf("the payload has %d bytes and the server's proto-max-bulk-len is %d", length, l.bulk)
	case l.query > 0 && size > l.query:
		return fmt.Sprintf("the event takes a command of %d bytes and the server's client-query-buffer-limit is %d",
			size, l.query)
	}
	return ""
}

// limits reads the limits of the server that holds stream.
func (s *Sink) limits(ctx context.Context, stream string) (serverLimits, error) {
	c, err := redisurl.Holder(ctx, s.o.Client, stream)
	if err != nil {
		return serverLimits{}, err
	}
	var l serverLimits
	for name, to := range map[string]*int64{"proto-max-bulk-len": &l.bulk, "client-query-buffer-limit": &l.query} {
		v, err := c.ConfigGet(ctx, name).Result()
		if err != nil {
			return serverLimits{}, fmt.Errorf("read %s: %w", name, err)
		}
		if *to, err = strconv.ParseInt(v[name], 10, 64); err != nil {
			return serverLimits{}, fmt.Errorf("read %s: %w", name, err)
		}
	}
	return l, nil
}
