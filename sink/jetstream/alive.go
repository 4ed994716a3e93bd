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

// Alive implements stream.Sink.
func (s *Sink) Alive(ctx context.Context, source uuid.UUID, m outbox.Member, before *outbox.Sign) (
	other *outbox.Sign, err error,
) {
	err = s.on(ctx, "sign in", SignStream, func(c *conn) (err error) {
		for range conflicts {
			if other, err = s.alive(ctx, c, signSubject+source.String(), m, before); !conflict(err) {
				break
			}
		}
		return err
	})
	return other, err
}

func (s *Sink) alive(ctx context.Context, c *conn, subject string, m outbox.Member, before *outbox.Sign) (
	*outbox.Sign, error,
) {
	last, err := c.get(ctx, SignStream, getRequest{LastFor: subject})
	if err == nil && last == nil { // the stream may not exist
		err = s.make(ctx, c, js.StreamConfig{
			Name: SignStream, Subjects: []string{signSubject + "*"}, MaxMsgsPerSubject: 1, AllowMsgTTL: true,
			MaxAge: outbox.TwinLasts,
		})
	}
	if err != nil {
		return nil, err
	}
	var theirs outbox.Sign
	seq := uint64(0)
	if last != nil {
		seq = last.Seq
		if err := json.Unmarshal(last.Data, &theirs); err != nil {
			return nil, err
		}
	}
	if last == nil || theirs.ID == m.ID || theirs.Server == m.Server {
		return nil, c.sign(ctx, subject, seq, outbox.Sign{Member: m, Text: uuid.NewString()}, outbox.SignLasts)
	}
	if before != nil && before.Text != theirs.Text {
		if err := c.sign(ctx, subject, seq, theirs, outbox.TwinLasts); err != nil {
			return nil, err
		}
	}
	return &theirs, nil
}

// sign writes a sign that replaces the one at seq.
func (c *conn) sign(ctx context.Context, subject string, seq uint64, body outbox.Sign, lasts time.Duration) error {
	m := expecting(subject, seq, body)
	m.Header.Set(js.MsgTTLHeader, lasts.String())
	_, err := c.commit(ctx, m)
	return err
}
