// Package natslog reads the events in streams of JetStream, for campaigns and benchmarks. It uses none of the sink's
// requests, because it verifies them. Entries have the form of those in Redis: the id is the time in milliseconds and
// the sequence.
package natslog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/redis/go-redis/v9"

	"posthaste/sink/jetstream"
)

// Log is a connection, which reconnects.
type Log struct {
	*nats.Conn

	JS nats.JetStreamContext
	// API is what subjects of JetStream's API begin with.
	API string
}

// Open connects to the servers of a --sink-url.
func Open(address string) (*Log, error) {
	o, err := jetstream.ParseURL(address)
	if err != nil {
		return nil, err
	}
	o.Connection = append(o.Connection, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	nc, err := nats.Connect(o.URL, o.Connection...)
	if err != nil {
		return nil, fmt.Errorf("connect to nats: %w", err)
	}
	l := &Log{Conn: nc, API: "$JS.API."}
	if o.Domain != "" {
		l.API = "$JS." + o.Domain + ".API."
	}
	l.JS, err = nc.JetStream(nats.APIPrefix(l.API))
	return l, err
}

// answerWithin bounds a request.
const answerWithin = 5 * time.Second

// Range returns up to n events of a stream from an entry on, or after it if the id begins with a parenthesis; "-" is
// the first entry. A stream that does not exist is empty.
func (l *Log) Range(ctx context.Context, stream, from string, n int64) (list []redis.XMessage, err error) {
	err = l.get(ctx, stream, first(from), n, func(m *nats.Msg) { list = append(list, entry(m)) })
	return list, err
}

func first(from string) uint64 {
	id, after := strings.CutPrefix(from, "(")
	_, text, _ := strings.Cut(id, "-")
	seq, _ := strconv.ParseUint(text, 10, 64) // "-" has none
	if after {
		seq++
	}
	return max(seq, 1)
}

// get passes up to n events from a sequence on to do.
func (l *Log) get(ctx context.Context, stream string, from uint64, n int64, do func(m *nats.Msg)) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	name := jetstream.StreamName(stream)
	body, err := json.Marshal(map[string]any{
		"seq": from, "next_by_subj": jetstream.EventsFilter(stream), "batch": n, "max_bytes": 4 << 20,
	})
	if err != nil {
		return err
	}
	inbox := l.NewInbox()
	sub, err := l.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := l.PublishRequest(l.API+"DIRECT.GET."+name, inbox, body); err != nil {
		return err
	}
	for {
		m, err := sub.NextMsgWithContext(ctx)
		if errors.Is(err, nats.ErrNoResponders) {
			if _, err = l.JS.StreamInfo(name, nats.Context(ctx)); errors.Is(err, nats.ErrStreamNotFound) {
				return nil
			}
			return errors.Join(nats.ErrNoResponders, err)
		}
		if err != nil {
			return err
		}
		switch status := m.Header.Get("Status"); status {
		case "":
			do(m)
		case "204", "404": // the end of the answer; there is none
			return nil
		default:
			return fmt.Errorf("read %s: status %s %s", name, status, m.Header.Get("Description"))
		}
	}
}

// entry returns a message in the form of an entry.
func entry(m *nats.Msg) redis.XMessage {
	h := m.Header
	at, _ := time.Parse(time.RFC3339Nano, h.Get("Nats-Time-Stamp"))
	e := redis.XMessage{ID: fmt.Sprintf("%d-%s", at.UnixMilli(), h.Get("Nats-Sequence"))}
	e.Values = map[string]any{"id": h.Get("ce-id"), "data": string(m.Data), "replayed": h.Get("ce-replayed")}
	for _, name := range []string{"subject", "type"} {
		e.Values[name], _ = url.PathUnescape(h.Get("ce-" + name))
	}
	return e
}

// Newest returns up to n events before an entry, "+" for the last one, the newest first.
func (l *Log) Newest(ctx context.Context, stream, to string, n int64) (list []redis.XMessage, err error) {
	last := first(to)
	if to == "+" {
		info, err := l.JS.StreamInfo(jetstream.StreamName(stream), nats.Context(ctx))
		if err != nil {
			return nil, err
		}
		last = info.State.LastSeq
	}
	const gates = 4                      // there are fewer messages of gates for each event
	before := min(last, uint64(gates*n)) //nolint:gosec // positive
	list, err = l.Range(ctx, stream, fmt.Sprint("0-", max(1, last-before)), gates*n)
	slices.Reverse(list)
	return list[:min(n, int64(len(list)))], err
}

// Remove deletes an entry.
func (l *Log) Remove(ctx context.Context, stream, id string) error {
	return l.JS.DeleteMsg(jetstream.StreamName(stream), first(id), nats.Context(ctx))
}

// Add adds a copy of an entry.
func (l *Log) Add(ctx context.Context, stream string, e redis.XMessage) error {
	value := func(name string) string { return fmt.Sprint(e.Values[name]) }
	m := nats.NewMsg(jetstream.EventSubject(stream, value("subject")))
	for _, name := range []string{"id", "subject", "type"} {
		m.Header["ce-"+name] = []string{url.PathEscape(value(name))}
	}
	m.Data = []byte(value("data"))
	_, err := l.JS.PublishMsg(m, nats.Context(ctx))
	return err
}

// gates are the subjects of all gates.
const gates = "posthaste-gate.>"

// Len returns how many events a stream has.
func (l *Log) Len(ctx context.Context, stream string) (n int64, err error) {
	info, err := l.JS.StreamInfo(jetstream.StreamName(stream), nats.Context(ctx),
		&nats.StreamInfoRequest{SubjectsFilter: gates})
	switch {
	case errors.Is(err, nats.ErrStreamNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	}
	n = int64(info.State.Msgs) //nolint:gosec // a number of messages
	for _, of := range info.State.Subjects {
		n -= int64(of) //nolint:gosec // a number of messages
	}
	return n, nil
}

// Make makes a stream of events that has no gate.
func (l *Log) Make(ctx context.Context, stream string) error {
	name := jetstream.StreamName(stream)
	return l.Ask(ctx, "STREAM.CREATE."+name, map[string]any{
		"name": name, "subjects": []string{jetstream.EventsFilter(stream)}, "storage": "file", "allow_atomic": true,
		"allow_direct": true,
	}, nil)
}

// Set changes settings of a stream, by their names in the API. It keeps the others, also those that the client does not
// know.
func (l *Log) Set(ctx context.Context, stream string, settings map[string]any) error {
	name := jetstream.StreamName(stream)
	var info struct{ Config map[string]any }
	if err := l.Ask(ctx, "STREAM.INFO."+name, map[string]any{}, &info); err != nil {
		return err
	}
	maps.Copy(info.Config, settings)
	return l.Ask(ctx, "STREAM.UPDATE."+name, info.Config, nil)
}

// Ask sends a request to the API, and decodes the answer into out if that is not nil.
func (l *Log) Ask(ctx context.Context, subject string, body map[string]any, out any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	m, err := l.RequestWithContext(ctx, l.API+subject, data)
	if err := answer(m, err); err != nil || out == nil {
		return err
	}
	return json.Unmarshal(m.Data, out)
}

// answer returns the error in an answer of JetStream.
func answer(m *nats.Msg, err error) error {
	if err != nil {
		return err
	}
	var refused struct{ Error *nats.APIError }
	if err := json.Unmarshal(m.Data, &refused); err != nil {
		return err
	}
	if refused.Error != nil {
		return refused.Error
	}
	return nil
}

// Batch publishes messages as one atomic batch.
func (l *Log) Batch(ctx context.Context, list []*nats.Msg) error {
	id := uuid.NewString()
	for i, m := range list {
		m.Header.Set("Nats-Batch-Id", id)
		m.Header.Set("Nats-Batch-Sequence", strconv.Itoa(i+1))
		if i < len(list)-1 {
			if err := l.PublishMsg(m); err != nil {
				return err
			}
		}
	}
	last := list[len(list)-1]
	last.Header.Set("Nats-Batch-Commit", "1")
	return answer(l.RequestMsgWithContext(ctx, last))
}

// Consume is a member of a group until ctx ends, or the group has no state any more. An event for which do returns an
// error is delivered again.
func (l *Log) Consume(ctx context.Context, stream, group string, do func(ctx context.Context, id string) error) error {
	name, durable := jetstream.StreamName(stream), jetstream.ConsumerName(group)
	_, err := l.JS.AddConsumer(name, &nats.ConsumerConfig{
		Durable: durable, AckPolicy: nats.AckExplicitPolicy, FilterSubject: jetstream.EventsFilter(stream),
	}, nats.Context(ctx))
	if err != nil {
		return err
	}
	sub, err := l.JS.PullSubscribe(jetstream.EventsFilter(stream), "", nats.Bind(name, durable))
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	for ctx.Err() == nil {
		list, err := sub.Fetch(10, nats.MaxWait(time.Second))
		if err != nil && !errors.Is(err, nats.ErrTimeout) {
			return err
		}
		for _, m := range list {
			if do(ctx, m.Header.Get("ce-id")) == nil {
				_ = m.Ack()
			} else {
				_ = m.NakWithDelay(time.Second)
			}
		}
	}
	return nil
}
