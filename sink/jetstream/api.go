package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/failpoint"
)

// callTimeout bounds one request, because a caller's context may have no deadline.
const callTimeout = 5 * time.Second

// The codes of refusals that have a meaning here, and no name in the client.
const (
	codeNoPeers      js.ErrorCode = 10005
	codeUnavailable  js.ErrorCode = 10008
	codeInsufficient js.ErrorCode = 10023
	codeNoStorage    js.ErrorCode = 10047
	codeCreateFailed js.ErrorCode = 10049
	codeNoCluster    js.ErrorCode = 10074
	codeStoreFailed  js.ErrorCode = 10077
	codeHeaderLarge  js.ErrorCode = 10097
	codeNoBatches    js.ErrorCode = 10174
	codeIncomplete   js.ErrorCode = 10176
)

func hasCode(err error, codes ...js.ErrorCode) bool {
	var api *js.APIError
	return errors.As(err, &api) && slices.Contains(codes, api.ErrorCode)
}

// call requests body of the JetStream API and decodes the answer into out.
func (c *conn) call(ctx context.Context, subject string, body, out any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	reply, err := c.request(ctx, &nats.Msg{Subject: c.api + subject, Data: data})
	if err != nil {
		return err
	}
	return decode(reply.Data, out)
}

// decode decodes an answer that may be a refusal.
func decode(data []byte, out any) error {
	var refused struct {
		Error *js.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &refused); err != nil {
		return fmt.Errorf("decode the answer of jetstream: %w", err)
	}
	if refused.Error != nil {
		return refused.Error
	}
	return json.Unmarshal(data, out)
}

// make makes a stream, unless another process has just made it.
func (s *Sink) make(ctx context.Context, c *conn, cfg js.StreamConfig) error {
	cfg.Replicas, cfg.AllowDirect = max(s.o.Replicas, 1), true
	err := c.call(ctx, "STREAM.CREATE."+cfg.Name, cfg, &js.StreamInfo{})
	switch {
	case hasCode(err, js.JSErrCodeStreamNameInUse):
		return nil
	case cfg.Replicas > 1 && hasCode(err, codeNoPeers, codeNoCluster):
		return s.unplaced(err)
	}
	return err
}

// info returns the state of a stream.
func (c *conn) info(ctx context.Context, name string) (*js.StreamInfo, error) {
	i := new(js.StreamInfo)
	return i, c.call(ctx, "STREAM.INFO."+name, struct{}{}, i)
}

// stage sends all messages of a batch except for the last one. The server stores none of them before the last one. It
// answers for each only if answers is set.
func (c *conn) stage(ctx context.Context, id string, messages []*nats.Msg, answers bool) error {
	for i, m := range messages {
		m.Header["Nats-Batch-Id"] = []string{id}
		m.Header["Nats-Batch-Sequence"] = []string{strconv.Itoa(i + 1)}
		var err error
		switch {
		case i == len(messages)-1:
			m.Header["Nats-Batch-Commit"] = []string{"1"}
		case !answers:
			failpoint.Before("stage")
			err = c.nc.PublishMsg(m)
			failpoint.After("stage")
		default:
			var reply *nats.Msg
			if reply, err = c.request(ctx, m); err == nil && len(reply.Data) > 0 {
				err = decode(reply.Data, &js.PubAck{})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// commit sends the last message of a batch, or a single message. The server stores all messages or none.
func (c *conn) commit(ctx context.Context, last *nats.Msg) (js.PubAck, error) {
	var ack js.PubAck
	reply, err := c.request(ctx, last)
	if err == nil {
		err = decode(reply.Data, &ack)
	}
	return ack, err
}

// write sends a whole batch.
func (c *conn) write(ctx context.Context, messages []*nats.Msg) (js.PubAck, error) {
	if err := c.stage(ctx, rand.Text(), messages, false); err != nil {
		return js.PubAck{}, err
	}
	return c.commit(ctx, messages[len(messages)-1])
}

// expecting returns a message on subject that the server refuses unless seq is the sequence of the last one there.
func expecting(subject string, seq uint64, body any) *nats.Msg {
	data, err := json.Marshal(body)
	if err != nil {
		panic(err) // the types of this package have no values that cannot be encoded
	}
	return &nats.Msg{Subject: subject, Data: data, Header: nats.Header{
		js.ExpectedLastSubjSeqHeader: []string{strconv.FormatUint(seq, 10)},
	}}
}

// conflict reports whether the server refused an expectation.
func conflict(err error) bool {
	return hasCode(err, js.JSErrCodeStreamWrongLastSequence, js.JSErrCodeStreamWrongLastSequenceConstant)
}
