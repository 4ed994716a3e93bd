package jetstream

import (
	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"
)

// SetFault replaces the sending of batches. send sends the messages of a batch and waits for the answer.
func (s *Sink) SetFault(f func(messages []*nats.Msg, send func() error) error) {
	s.send = func(messages []*nats.Msg, send func() (js.PubAck, error)) (ack js.PubAck, err error) {
		err = f(messages, func() error {
			ack, err = send()
			return err
		})
		return ack, err
	}
}
