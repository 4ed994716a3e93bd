package jetstream

import (
	"bytes"
	"fmt"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

// Names of the headers of an event: those of the NATS binding of CloudEvents. They have no Nats-Msg-Id, because the
// server keeps the ids of messages that were purged, and refuses a whole batch that has one of them: a lost event could
// not be restored within the duplicate window.
const (
	headerID          = "ce-id"
	headerSource      = "ce-source"
	headerType        = "ce-type"
	headerSubject     = "ce-subject"
	headerTime        = "ce-time"
	headerSpecVersion = "ce-specversion"
	headerContent     = "content-type"
	headerTrace       = "traceparent"
	headerHeaders     = "ce-headers"
	headerReplayed    = "ce-replayed"
)

// timeForm is RFC 3339 with six digits, as in the entries of Redis.
const timeForm = "2006-01-02T15:04:05.000000Z07:00"

// encode returns the message of an event.
func (s *Sink) encode(subject string, e *outbox.Record) *nats.Msg {
	trace, others := e.SplitHeaders()
	h := make(nats.Header, 12)
	h[headerID] = []string{e.ID.String()}
	h[headerSource] = []string{attribute(s.o.Source)}
	h[headerType] = []string{attribute(e.Type)}
	h[headerSubject] = []string{attribute(e.AggregateID)}
	h[headerTime] = []string{e.Time.UTC().Format(timeForm)}
	h[headerSpecVersion] = []string{"1.0"}
	h[headerContent] = []string{"application/json"}
	if trace != "" {
		h[headerTrace] = []string{attribute(trace)}
	}
	if others != nil {
		// A line break in JSON is white space: within a text it is written as \n.
		h[headerHeaders] = []string{string(bytes.Map(func(r rune) rune {
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
	if m.Header.Get(headerReplayed) != "" {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(m.Header.Get(headerID))
	return id, err == nil
}

// headerOverhead is more than what a batch adds to the headers of an event, which may include the subject of another
// one. maxHeaders is what JetStream accepts.
const (
	headerOverhead = 512 + 2*maxToken
	maxHeaders     = 60 << 10
)

// size returns about how many bytes the headers and the whole message take.
func size(m *nats.Msg) (headers, all int) {
	headers = headerOverhead
	for k, v := range m.Header {
		headers += len(k) + len(v[0]) + len(": \r\n")
	}
	return headers, headers + len(m.Data)
}

// refuses returns the reason if the server would refuse an event for its size.
func refuses(m *nats.Msg, limit int64) error {
	switch headers, all := size(m); {
	case headers > maxHeaders:
		return fmt.Errorf("the headers have %d bytes, and JetStream accepts %d", headers, maxHeaders)
	case int64(all) > limit:
		return fmt.Errorf("the message has %d bytes, and the server's max_payload is %d", all, limit)
	}
	return nil
}
