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
	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/internal/pause"
)

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
func (c *conn) get(ctx context.Context, name string, req getRequest) (*message, error) {
	var reply struct{ Message message }
	err := c.call(ctx, "STREAM.MSG.GET."+name, req, &reply)
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

// elections is how often a request is repeated that no server takes: the stream has no leader at the moment.
const (
	elections     = 50
	electionPause = 20 * time.Millisecond
)

// pageMessages and pageBytes bound what one request reads.
const (
	pageMessages = 1000
	pageBytes    = 4 << 20
)

// scan passes the messages from a sequence, or from the time in req, to visit, until visit returns errStop. It requests
// at most req.Batch messages at once if that is set: the server sends a page even if visit stops. Any replica may
// answer. A stream that does not exist is empty.
func (c *conn) scan(ctx context.Context, name string, req getRequest, visit func(m *message) error) error {
	if req.Batch == 0 || req.Batch > pageMessages {
		req.Batch = pageMessages
	}
	req.MaxBytes = pageBytes
	for missed := 0; ; {
		last, more, err := c.page(ctx, name, req, visit)
		if errors.Is(err, nats.ErrNoResponders) && missed < elections {
			if missed++; missed == 1 {
				if _, err := c.info(ctx, name); hasCode(err, js.JSErrCodeStreamNotFound) {
					return nil
				}
			}
			_ = pause.For(ctx, electionPause)
			continue
		}
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
	data, err := json.Marshal(req)
	if err != nil {
		return 0, false, err
	}
	inbox := c.nc.NewInbox()
	sub, err := c.nc.SubscribeSync(inbox)
	if err != nil {
		return 0, false, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	var visited error
	subject := c.api + "DIRECT.GET." + name
	err = c.bounded(ctx, subject, func(ctx context.Context) error {
		err := c.nc.PublishRequest(subject, inbox, data)
		for err == nil && visited == nil {
			var reply *nats.Msg
			if reply, err = sub.NextMsgWithContext(ctx); err != nil {
				break
			}
			switch status := reply.Header.Get("Status"); status {
			case "":
				m := stored(reply)
				last = m.Seq
				visited = visit(m)
			case "204":
				more = last > 0 && reply.Header.Get("Nats-Num-Pending") != "0" && len(req.MultiLast) == 0
				return nil
			case "404":
				return nil
			default:
				err = fmt.Errorf("read stream %s: status %s %s", name, status, reply.Header.Get("Description"))
			}
		}
		return err
	})
	if err == nil {
		err = visited
	}
	return last, more, err
}
