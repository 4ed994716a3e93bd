package jetstream

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

// maxName bounds names of streams, and maxToken a token of a subject. Longer ones end with a digest.
const (
	maxName  = 180
	maxToken = 400
)

// StreamName returns the name of the JetStream stream of a stream of the outbox: OUTBOX_ORDER for outbox.order. Lower
// case letters become upper case, and a dot an underscore. Each byte that is not a lower case letter, a digit or a dot
// becomes a hyphen and two hexadecimal digits, so two streams never have the same name.
func StreamName(stream string) string {
	name := strings.ToUpper(encode(stream, '-', lower+digits+"."))
	return shorten(strings.ReplaceAll(name, ".", "_"), maxName, "--", stream)
}

// ConsumerName returns the name of the durable consumer of a group. GroupName is its inverse.
func ConsumerName(group string) string { return encode(group, '=', word) }

// GroupName returns the group of a durable consumer.
func GroupName(consumer string) string {
	group, err := url.PathUnescape(strings.ReplaceAll(consumer, "=", "%"))
	if err != nil || strings.Contains(consumer, "%") { // posthaste has not made it
		return consumer
	}
	return group
}

// EventSubject returns the subject of the events of an aggregate: that of the stream and one token. The token of an
// empty aggregate id is a percent sign.
func EventSubject(stream, aggregate string) string {
	return subjectOf(stream) + "." + aggregateToken(aggregate)
}

// EventsFilter returns the subject that matches all events of a stream, and no gate.
func EventsFilter(stream string) string { return subjectOf(stream) + ".*" }

func aggregateToken(aggregate string) string {
	if aggregate == "" {
		return "%"
	}
	return shorten(encode(aggregate, '%', word), maxToken, "%-", aggregate)
}

// subjectOf returns the subject that the events of a stream begin with. The dots in the name separate tokens, except
// for those that would make an empty one.
func subjectOf(stream string) string {
	subject := emptyToken.ReplaceAllStringFunc(encode(stream, '%', word+"."), func(dots string) string {
		return strings.Repeat("%2E", len(dots))
	})
	return shorten(subject, maxToken, "%-", stream)
}

var emptyToken = regexp.MustCompile(`^\.+|\.{2,}|\.$`)

// The bytes that encode may leave.
const (
	lower  = "abcdefghijklmnopqrstuvwxyz"
	digits = "0123456789"
	word   = lower + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + digits + "-_"
)

// encode replaces each byte that is not plain by mark and two digits.
func encode(s string, mark byte, plain string) string {
	var b strings.Builder
	written := 0
	for i := range len(s) {
		if strings.IndexByte(plain, s[i]) < 0 {
			fmt.Fprintf(&b, "%s%c%02X", s[written:i], mark, s[i])
			written = i + 1
		}
	}
	if written == 0 {
		return s
	}
	return b.String() + s[written:]
}

// shorten replaces the end of a long name by a digest of the original. No escape begins with mark.
func shorten(name string, most int, mark, original string) string {
	if len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(original))
	return strings.TrimRight(name[:most/2], ".") + mark + hex.EncodeToString(sum[:])
}

const (
	// gateRoot is what the subjects of all gates begin with.
	gateRoot = "posthaste-gate."
	// ownerLane is the lane of the owner's messages, and recallLane that of recalled events.
	ownerLane  = "owner"
	recallLane = "recalled"
)

// lanes are the names of the lanes that publish.
var lanes = func() []string {
	list := []string{outbox.Lane{Part: outbox.StreamLane}.Name(), outbox.Lane{Part: outbox.RestoreLane}.Name()}
	for part := range outbox.Partitions {
		list = append(list, outbox.Lane{Part: part}.Name())
	}
	return list
}()

// timeForm is RFC 3339 with six digits, as in the entries of Redis.
const timeForm = "2006-01-02T15:04:05.000000Z07:00"

// encode returns the message of an event. Its headers are those of the NATS binding of CloudEvents. It has no
// Nats-Msg-Id, because the server keeps the ids of messages that were purged, and refuses a whole batch that has one of
// them: a lost event could not be restored within the duplicate window.
func (s *Sink) encode(subject string, e *outbox.Record) *nats.Msg {
	trace, others := e.SplitHeaders()
	h := make(nats.Header, 12)
	h["ce-id"] = []string{e.ID.String()}
	h["ce-source"] = []string{attribute(s.o.Source)}
	h["ce-type"] = []string{attribute(e.Type)}
	h["ce-subject"] = []string{attribute(e.AggregateID)}
	h["ce-time"] = []string{e.Time.UTC().Format(timeForm)}
	h["ce-specversion"] = []string{"1.0"}
	h["content-type"] = []string{"application/json"}
	if trace != "" {
		h["traceparent"] = []string{attribute(trace)}
	}
	if others != nil {
		// A line break in JSON is white space: within a text it is written as \n.
		h["ce-headers"] = []string{string(bytes.Map(func(r rune) rune {
			if r == '\r' || r == '\n' {
				return ' '
			}
			return r
		}, others))}
	}
	return &nats.Msg{Subject: subject + aggregateToken(e.AggregateID), Header: h, Data: e.Payload}
}

// attribute encodes a value as CloudEvents do in headers: bytes that are not printable ASCII, spaces, quotes and
// percent signs become a percent sign and two digits.
func attribute(v string) string {
	return encode(v, '%', word+"!#$&'()*+,./:;<=>?@[\\]^`{|}~")
}

// event returns the id of an event; false if the message has no event, or a replay has added it.
func (m *message) event() (uuid.UUID, bool) {
	if m.Header.Get("ce-replayed") != "" {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(m.Header.Get("ce-id"))
	return id, err == nil
}

// headerOverhead is more than what a batch adds to the headers of an event, which may include the subject of another
// one. maxHeaders is what JetStream accepts.
const (
	headerOverhead = 512 + 2*maxToken
	maxHeaders     = 60 << 10
)

// refuses returns the reason if the server would refuse an event for its size.
func refuses(m *nats.Msg, limit int64) error {
	headers := headerOverhead
	for k, v := range m.Header {
		headers += len(k) + len(v[0]) + len(": \r\n")
	}
	switch all := headers + len(m.Data); {
	case headers > maxHeaders:
		return fmt.Errorf("the headers have %d bytes, and JetStream accepts %d", headers, maxHeaders)
	case int64(all) > limit:
		return fmt.Errorf("the message has %d bytes, and the server's max_payload is %d", all, limit)
	}
	return nil
}
