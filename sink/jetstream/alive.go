package jetstream

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
)

// SignStream has the signs. No stream of the outbox can have its name. The server removes signs in time.
const SignStream = "POSTHASTE--ALIVE"

const signSubject = "posthaste-alive."

// sign is the message of a leader. Its text changes with every sign.
type sign struct {
	ID     string `json:"id"`
	Server string `json:"server"`
	Holder string `json:"holder"`
	Text   string `json:"text"`
}

// Alive implements stream.Sink.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	*outbox.Sign, error,
) {
	c, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	for range conflicts {
		var other *outbox.Sign
		if other, err = s.alive(ctx, c, signSubject+source.String(), m, before); !conflict(err) {
			return other, s.failed(c, "sign in", SignStream, err)
		}
	}
	return nil, s.failed(c, "sign in", SignStream, err)
}

func (s *Sink) alive(ctx context.Context, c *conn, subject string, m outbox.Member, before *outbox.Sign) (
	*outbox.Sign, error,
) {
	last, err := c.get(ctx, SignStream, getRequest{LastFor: subject})
	if hasCode(err, js.JSErrCodeStreamNotFound) {
		err = s.make(ctx, c, js.StreamConfig{
			Name: SignStream, Subjects: []string{signSubject + "*"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true,
			MaxAge: outbox.TwinLasts,
		})
	}
	if err != nil {
		return nil, err
	}
	var theirs sign
	seq := uint64(0)
	if last != nil {
		seq = last.Seq
		if err := json.Unmarshal(last.Data, &theirs); err != nil {
			return nil, err
		}
	}
	if last == nil || theirs.ID == m.ID || theirs.Server == m.Server {
		mine := sign{ID: m.ID, Server: m.Server, Holder: m.Holder, Text: uuid.NewString()}
		return nil, c.sign(ctx, subject, seq, mine, outbox.SignLasts)
	}
	if before != nil && before.Text != theirs.Text {
		if err := c.sign(ctx, subject, seq, theirs, outbox.TwinLasts); err != nil {
			return nil, err
		}
	}
	return &outbox.Sign{
		Member: outbox.Member{ID: theirs.ID, Server: theirs.Server, Holder: theirs.Holder}, Text: theirs.Text,
	}, nil
}

// sign writes a sign that replaces the one at seq.
func (c *conn) sign(ctx context.Context, subject string, seq uint64, body sign, lasts time.Duration) error {
	m := expecting(subject, seq, body)
	m.Header.Set(js.MsgTTLHeader, lasts.String())
	_, err := c.commit(ctx, m)
	return err
}
