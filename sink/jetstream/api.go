package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
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
	codeNoMessage   = 10037
	codeTooLarge    = 10054
	codeNoStream    = 10059
	codeNameInUse   = 10058
	codeWrongLast   = 10071
	codeHeaderLarge = 10097
	codeInFlight    = 10164
	codeNoBatches   = 10174
	codeIncomplete  = 10176
)

func hasCode(err error, codes ...int) bool {
	var api *APIError
	if errors.As(err, &api) {
		for _, c := range codes {
			if api.ErrCode == c {
				return true
			}
		}
	}
	return false
}

// streamConfig has what this package sets and reads of the configuration of a stream.
type streamConfig struct {
	Name        string   `json:"name"`
	Subjects    []string `json:"subjects"`
	Storage     string   `json:"storage"`
	Retention   string   `json:"retention"`
	Replicas    int      `json:"num_replicas"`
	MaxAge      int64    `json:"max_age,omitempty"`
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

// message is a stored message.
type message struct {
	Subject string
	Seq     uint64
	Time    time.Time
	Header  nats.Header
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

type getRequest struct {
	Seq       uint64     `json:"seq,omitempty"`
	LastFor   string     `json:"last_by_subj,omitempty"`
	NextFor   string     `json:"next_by_subj,omitempty"`
	Batch     int        `json:"batch,omitempty"`
	MaxBytes  int        `json:"max_bytes,omitempty"`
	StartTime *time.Time `json:"start_time,omitempty"`
	MultiLast []string   `json:"multi_last,omitempty"`
}

// get reads one message from the leader of the stream; nil if it does not exist. A follower may be behind.
func (c *conn) get(ctx context.Context, name string, req getRequest) (*message, error) {
	var reply struct {
		Message struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Time    time.Time `json:"time"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
		} `json:"message"`
	}
	err := c.call(ctx, "STREAM.MSG.GET."+name, req, &reply)
	if hasCode(err, codeNoMessage) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, err
	}
	r := reply.Message
	m := &message{Subject: r.Subject, Seq: r.Seq, Time: r.Time, Data: r.Data}
	if len(r.Header) > 0 {
		m.Header, err = nats.DecodeHeadersMsg(r.Header)
	}
	return m, err
}

// getAny is get from any replica, which is faster. Only the leader decides that a message does not exist.
func (c *conn) getAny(ctx context.Context, name string, req getRequest) (*message, error) {
	data, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	reply, err := c.request(ctx, &nats.Msg{Subject: c.api + "DIRECT.GET." + name, Data: data})
	if errors.Is(err, nats.ErrNoResponders) || err == nil && reply.Header.Get("Status") != "" {
		return c.get(ctx, name, req)
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

// errStop ends a scan.
var errStop = errors.New("stop")

// pageMessages and pageBytes bound what one request reads.
const (
	pageMessages = 1000
	pageBytes    = 4 << 20
)

// scan passes the messages from a sequence, or from the time in req, to visit, until visit returns errStop. Any replica
// may answer. A stream that does not exist is empty.
func (c *conn) scan(ctx context.Context, name string, req getRequest, visit func(m *message) error) error {
	req.Batch, req.MaxBytes = pageMessages, pageBytes
	for {
		last, more, err := c.page(ctx, name, req, visit)
		if errors.Is(err, errStop) {
			return nil
		}
		if err != nil || !more {
			return err
		}
		req.Seq, req.StartTime = last+1, nil
	}
}

// page makes one request for several messages, and returns the last one that was read.
func (c *conn) page(ctx context.Context, name string, req getRequest, visit func(m *message) error) (
	last uint64, more bool, err error,
) {
	ctx, cancel := c.within(ctx)
	defer cancel()
	data, err := json.Marshal(req)
	if err != nil {
		return 0, false, err
	}
	inbox := c.nc.NewRespInbox()
	sub, err := c.nc.SubscribeSync(inbox)
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err = c.nc.PublishRequest(c.api+"DIRECT.GET."+name, inbox, data); err != nil {
		return 0, false, err
	}
	for {
		reply, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return 0, false, err
		}
		switch status := reply.Header.Get("Status"); status {
		case "":
		case "204":
			return last, last > 0 && reply.Header.Get("Nats-Num-Pending") != "0" && len(req.MultiLast) == 0, nil
		case "404":
			return last, false, nil
		case "503": // nothing answers for the name
			if _, err := c.info(ctx, name); !hasCode(err, codeNoStream) {
				return 0, false, errors.Join(nats.ErrNoResponders, err)
			}
			return last, false, nil
		default:
			return 0, false, fmt.Errorf("read stream %s: status %s %s", name, status, reply.Header.Get("Description"))
		}
		m := stored(reply)
		last = m.Seq
		if err := visit(m); err != nil {
			return 0, false, err
		}
	}
}

// batchAck is the answer to the last message of a batch.
type batchAck struct {
	Seq   uint64 `json:"seq"`
	Count int    `json:"count"`
}

// Names of headers that JetStream evaluates.
const (
	headerBatch    = "Nats-Batch-Id"
	headerSequence = "Nats-Batch-Sequence"
	headerCommit   = "Nats-Batch-Commit"
	headerExpected = "Nats-Expected-Last-Subject-Sequence"
	headerTTL      = "Nats-TTL"
)

// stage sends all messages of a batch except for the last one. The server stores none of them before the last one.
func (c *conn) stage(id string, messages []*nats.Msg) error {
	for i, m := range messages {
		m.Header[headerBatch] = []string{id}
		m.Header[headerSequence] = []string{strconv.Itoa(i + 1)}
		if i == len(messages)-1 {
			m.Header[headerCommit] = []string{"1"}
			return nil
		}
		if err := c.nc.PublishMsg(m); err != nil {
			return err
		}
	}
	return nil
}

// commit sends the last message of a batch. The server stores all messages or none.
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
	if err := c.stage(id, messages); err != nil {
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

// stageCarefully is stage with an answer for every message. It passes refusals to refused and returns the first one.
func (c *conn) stageCarefully(
	ctx context.Context, id string, messages []*nats.Msg, refused func(i int, err error),
) error {
	for i, m := range messages {
		m.Header[headerBatch] = []string{id}
		m.Header[headerSequence] = []string{strconv.Itoa(i + 1)}
		if i == len(messages)-1 {
			m.Header[headerCommit] = []string{"1"}
			return nil
		}
		reply, err := c.request(ctx, m)
		if err == nil && len(reply.Data) > 0 {
			if err = decode(reply.Data, &batchAck{}); hasCode(err, codeTooLarge, codeHeaderLarge) {
				refused(i, err)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func unmarshal(m *message, out any) error { return json.Unmarshal(m.Data, out) }
