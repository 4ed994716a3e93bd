package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"posthaste/internal/failpoint"
)

// callTimeout bounds one request, because a caller's context may have no deadline.
const callTimeout = 5 * time.Second

// APIError is a refusal by JetStream.
type APIError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (e *APIError) Error() string { return fmt.Sprintf("jetstream: %s (%d)", e.Description, e.ErrCode) }

// The codes of refusals that have a meaning here.
const (
	codeUnavailable  = 10008
	codeInsufficient = 10023
	codeNoMessage    = 10037
	codeNoStorage    = 10047
	codeCreateFailed = 10049
	codeStoreFailed  = 10077
	codeTooLarge     = 10054
	codeNoStream     = 10059
	codeNameInUse    = 10058
	codeWrongLast    = 10071
	codeHeaderLarge  = 10097
	codeInFlight     = 10164
	codeNoBatches    = 10174
	codeIncomplete   = 10176
)

func hasCode(err error, codes ...int) bool {
	var api *APIError
	return errors.As(err, &api) && slices.Contains(codes, api.ErrCode)
}

// streamConfig has what this package sets and reads of the configuration of a stream.
type streamConfig struct {
	Name        string   `json:"name"`
	Subjects    []string `json:"subjects"`
	Storage     string   `json:"storage"`
	Retention   string   `json:"retention"`
	Replicas    int      `json:"num_replicas"`
	MaxAge      int64    `json:"max_age,omitempty"`
	MaxMsgs     int64    `json:"max_msgs,omitempty"`
	MaxBytes    int64    `json:"max_bytes,omitempty"`
	Discard     string   `json:"discard,omitempty"`
	PersistMode string   `json:"persist_mode,omitempty"`
	PerSubject  int64    `json:"max_msgs_per_subject,omitempty"`
	Atomic      bool     `json:"allow_atomic"`
	Direct      bool     `json:"allow_direct"`
	TTL         bool     `json:"allow_msg_ttl,omitempty"`
}

// streamInfo is the answer to a request for a stream.
type streamInfo struct {
	Config  json.RawMessage `json:"config"`
	Created time.Time       `json:"created"`
	Now     time.Time       `json:"ts"`
	State   struct {
		Messages int    `json:"messages"`
		First    uint64 `json:"first_seq"`
		Last     uint64 `json:"last_seq"`
	} `json:"state"`
	cfg streamConfig
}

// call requests body of the JetStream API and decodes the answer into out.
func (c *conn) call(ctx context.Context, subject string, body, out any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	reply, err := c.request(ctx, &nats.Msg{Subject: apiRoot + subject, Data: data})
	if err != nil {
		return err
	}
	return decode(reply.Data, out)
}

// decode decodes an answer that may be a refusal.
func decode(data []byte, out any) error {
	var refused struct {
		Error *APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &refused); err != nil {
		return fmt.Errorf("decode the answer of jetstream: %w", err)
	}
	if refused.Error != nil {
		return refused.Error
	}
	return json.Unmarshal(data, out)
}

// info returns the state of a stream.
func (c *conn) info(ctx context.Context, name string) (i streamInfo, err error) {
	if err = c.call(ctx, "STREAM.INFO."+name, struct{}{}, &i); err == nil {
		err = json.Unmarshal(i.Config, &i.cfg)
	}
	return i, err
}

// batchAck is the answer to the last message of a batch.
type batchAck struct {
	Seq   uint64 `json:"seq"`
	Count int    `json:"count"`
}

// Names of headers that JetStream evaluates.
const (
	headerBatch      = "Nats-Batch-Id"
	headerSequence   = "Nats-Batch-Sequence"
	headerCommit     = "Nats-Batch-Commit"
	headerExpected   = "Nats-Expected-Last-Subject-Sequence"
	headerExpectedOf = "Nats-Expected-Last-Subject-Sequence-Subject"
	headerTTL        = "Nats-TTL"
)

// stage sends all messages of a batch except for the last one. The server stores none of them before the last one. It
// answers for each only if refused is not nil, which gets the refusals of single messages; the first one ends the call.
func (c *conn) stage(ctx context.Context, id string, messages []*nats.Msg, refused func(i int, err error)) error {
	for i, m := range messages {
		m.Header[headerBatch] = []string{id}
		m.Header[headerSequence] = []string{strconv.Itoa(i + 1)}
		var err error
		switch {
		case i == len(messages)-1:
			m.Header[headerCommit] = []string{"1"}
		case refused == nil:
			failpoint.Before("stage")
			err = c.nc.PublishMsg(m)
			failpoint.After("stage")
		default:
			var reply *nats.Msg
			if reply, err = c.request(ctx, m); err == nil && len(reply.Data) > 0 {
				err = decode(reply.Data, &batchAck{})
			}
			if hasCode(err, codeTooLarge, codeHeaderLarge) {
				refused(i, err)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// commit sends the last message of a batch, or a single message. The server stores all messages or none.
func (c *conn) commit(ctx context.Context, last *nats.Msg) (batchAck, error) {
	var ack batchAck
	reply, err := c.request(ctx, last)
	if err == nil {
		err = decode(reply.Data, &ack)
	}
	return ack, err
}

// write sends a whole batch.
func (c *conn) write(ctx context.Context, id string, messages []*nats.Msg) (batchAck, error) {
	if err := c.stage(ctx, id, messages, nil); err != nil {
		return batchAck{}, err
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
		headerExpected: []string{strconv.FormatUint(seq, 10)},
	}}
}

// conflict reports whether the server refused an expectation.
func conflict(err error) bool { return hasCode(err, codeWrongLast, codeInFlight) }
