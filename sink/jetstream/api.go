package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/failpoint"
	"posthaste/internal/pause"
)

const (
	// callTimeout bounds one request, because a caller's context may have no deadline.
	callTimeout = 5 * time.Second
	// conflicts is how often one call repeats an expectation that was wrong, and backoff how long it waits before that.
	// Other calls rewrite the message of a lane now and then.
	conflicts = 20
	backoff   = 2 * time.Millisecond
	// elections is how often a request is repeated that no server takes: the stream has no leader at the moment.
	elections     = 50
	electionPause = 20 * time.Millisecond
	// pageMessages and pageBytes bound what one request reads.
	pageMessages = 1000
	pageBytes    = 4 << 20
)

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

// ask sends body to the JetStream API and returns the answer.
func (c *conn) ask(ctx context.Context, subject string, body any) (*nats.Msg, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	return c.request(ctx, &nats.Msg{Subject: c.api + subject, Data: data})
}

// call is ask that decodes the answer into out.
func (c *conn) call(ctx context.Context, subject string, body, out any) error {
	reply, err := c.ask(ctx, subject, body)
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

// repeated calls f at most so many times, until its expectation is right.
func repeated(ctx context.Context, times int, f func() error) (err error) {
	for range times {
		if err = f(); !conflict(err) {
			return err
		}
		if ended := pause.For(ctx, backoff); ended != nil {
			return ended
		}
	}
	return err
}

// conflict reports whether the server refused an expectation.
func conflict(err error) bool {
	return hasCode(err, js.JSErrCodeStreamWrongLastSequence, js.JSErrCodeStreamWrongLastSequenceConstant)
}

// remote is a stream on the servers.
type remote struct {
	*conn
	// stream is its name in the outbox, and name its name in JetStream.
	stream, name string
	// root is the subject of its gate without the lane; "" before it was read, and if the stream is not configured to
	// have a gate.
	root string
}

func (r *remote) subject(lane string) string { return r.root + "." + lane }

// state returns the state of the stream; nil if it does not exist.
func (r *remote) state(ctx context.Context) (info *js.StreamInfo, err error) {
	err = r.call(ctx, "STREAM.INFO."+r.name, struct{}{}, &info)
	if hasCode(err, js.JSErrCodeStreamNotFound) {
		return nil, nil //nolint:nilnil // there is none
	}
	return info, err
}

// message is a stored message, as the API encodes it, and with its headers decoded.
type message struct {
	Subject string
	Seq     uint64
	Time    time.Time
	Hdrs    []byte
	Header  nats.Header `json:"-"`
	Data    []byte
}

// entry returns the entry id of a message: its time in milliseconds and its sequence.
func (m *message) entry() string { return fmt.Sprintf("%d-%d", m.Time.UnixMilli(), m.Seq) }

// seqOf returns the sequence in an entry id.
func seqOf(entry string) uint64 {
	_, seq, _ := strings.Cut(entry, "-")
	n, _ := strconv.ParseUint(seq, 10, 64)
	return n
}

type getRequest struct {
	Seq       uint64     `json:"seq,omitempty"`
	LastFor   string     `json:"last_by_subj,omitempty"`
	NextFor   string     `json:"next_by_subj,omitempty"`
	Batch     int        `json:"batch,omitempty"`
	MaxBytes  int        `json:"max_bytes,omitempty"`
	StartTime *time.Time `json:"start_time,omitempty"`
	MultiLast []string   `json:"multi_last,omitempty"`
}

// get reads one message from the leader of the stream; nil if it, or the stream, does not exist. A follower may be
// behind.
func (r *remote) get(ctx context.Context, req getRequest) (*message, error) {
	var reply struct{ Message message }
	err := r.call(ctx, "STREAM.MSG.GET."+r.name, req, &reply)
	if hasCode(err, js.JSErrCodeMessageNotFound, js.JSErrCodeStreamNotFound) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, err
	}
	m := &reply.Message
	if len(m.Hdrs) > 0 {
		m.Header, err = nats.DecodeHeadersMsg(m.Hdrs)
	}
	return m, err
}

// getAny is get from any replica, which is faster. Only the leader decides that a message does not exist.
func (r *remote) getAny(ctx context.Context, req getRequest) (*message, error) {
	reply, err := r.ask(ctx, "DIRECT.GET."+r.name, req)
	if errors.Is(err, nats.ErrNoResponders) || err == nil && reply.Header.Get("Status") != "" {
		return r.get(ctx, req)
	}
	if err != nil {
		return nil, err
	}
	return stored(reply), nil
}

// stored decodes a message that a replica has sent.
func stored(reply *nats.Msg) *message {
	m := &message{Subject: reply.Header.Get("Nats-Subject"), Header: reply.Header, Data: reply.Data}
	m.Seq, _ = strconv.ParseUint(reply.Header.Get("Nats-Sequence"), 10, 64)
	m.Time, _ = time.Parse(time.RFC3339Nano, reply.Header.Get("Nats-Time-Stamp"))
	return m
}

// scan returns the messages from a sequence on, or from the time in req, until an error. It requests at most req.Batch
// messages at once if that is set: the server sends a whole page even if the caller stops. Any replica may answer. A
// stream that does not exist is empty.
func (r *remote) scan(ctx context.Context, req getRequest) iter.Seq2[*message, error] {
	if req.Batch == 0 || req.Batch > pageMessages {
		req.Batch = pageMessages
	}
	req.MaxBytes = pageBytes
	return func(yield func(*message, error) bool) {
		for missed := 0; ; {
			page, more, err := r.page(ctx, req)
			if errors.Is(err, nats.ErrNoResponders) && missed < elections {
				if missed++; missed == 1 {
					if info, err := r.state(ctx); info == nil && err == nil {
						return
					}
				}
				_ = pause.For(ctx, electionPause)
				continue
			}
			for _, m := range page {
				if !yield(m, nil) {
					return
				}
				req.Seq, req.StartTime = m.Seq+1, nil
			}
			if err != nil {
				yield(nil, err)
			}
			if err != nil || !more {
				return
			}
		}
	}
}

// page makes one request for several messages.
func (r *remote) page(ctx context.Context, req getRequest) (page []*message, more bool, err error) {
	data, err := json.Marshal(req)
	if err != nil {
		return nil, false, err
	}
	inbox := r.nc.NewInbox()
	sub, err := r.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, false, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	subject := r.api + "DIRECT.GET." + r.name
	err = r.bounded(ctx, subject, func(ctx context.Context) error {
		if err := r.nc.PublishRequest(subject, inbox, data); err != nil {
			return err
		}
		for {
			reply, err := sub.NextMsgWithContext(ctx)
			if err != nil {
				return err
			}
			switch status := reply.Header.Get("Status"); status {
			case "":
				page = append(page, stored(reply))
			case "204", "404": // the end of the page; there is none
				more = len(page) > 0 && reply.Header.Get("Nats-Num-Pending") != "0" && len(req.MultiLast) == 0
				return nil
			default:
				return fmt.Errorf("read stream %s: status %s %s", r.name, status, reply.Header.Get("Description"))
			}
		}
	})
	return page, more, err
}
