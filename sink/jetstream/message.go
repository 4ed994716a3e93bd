package jetstream

import (
	"bytes"
	"fmt"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

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
