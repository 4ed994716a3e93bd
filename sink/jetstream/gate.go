package jetstream

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	js "github.com/nats-io/nats.go/jetstream"

	"posthaste/outbox"
)

// laneAt is a lane's last message and its sequence.
type laneAt struct {
	lanePost
	seq uint64
}

// gate is the state of a gate and its stream.
type gate struct {
	stream string
	name   string
	// info is nil if the stream does not exist.
	info *js.StreamInfo
	// root is the gate's subject without the lane; "" if the stream is not configured to have a gate.
	root string
	// owner is nil without a gate; at is its sequence.
	owner *ownerPost
	at    uint64
	lanes map[string]laneAt
}

// subject returns the subject of a lane.
func (g *gate) subject(lane string) string { return g.root + "." + lane }

// rooted returns the state of a stream and the subject of its gate. Without that, it returns ErrGap.
func (c *conn) rooted(ctx context.Context, name string) (info *js.StreamInfo, root string, err error) {
	info, err = c.info(ctx, name)
	if err == nil {
		root = rootOf(info)
	}
	if hasCode(err, js.JSErrCodeStreamNotFound) || err == nil && root == "" {
		err = outbox.ErrGap
	}
	return info, root, err
}

// rootOf returns the subject of a stream's gate, by its configuration.
func rootOf(info *js.StreamInfo) string {
	for _, subject := range info.Config.Subjects {
		if strings.HasPrefix(subject, gateRoot) && strings.HasSuffix(subject, ".*") {
			return strings.TrimSuffix(subject, ".*")
		}
	}
	return ""
}

// read reads a gate and the state of its stream. A stream that does not exist has no gate. Any replica may answer for
// the lanes, so a caller that writes must expect the sequences that it has read.
func (c *conn) read(ctx context.Context, stream string) (*gate, error) {
	g := &gate{stream: stream, name: StreamName(stream), lanes: map[string]laneAt{}}
	info, err := c.info(ctx, g.name)
	if hasCode(err, js.JSErrCodeStreamNotFound) {
		return g, nil
	}
	if err != nil {
		return nil, err
	}
	g.info = info
	if g.root = rootOf(g.info); g.root == "" || !g.info.Config.AllowDirect {
		return g, nil
	}
	req := getRequest{MultiLast: []string{g.root + ".*"}}
	err = c.scan(ctx, g.name, req, func(m *message) error {
		lane := strings.TrimPrefix(m.Subject, g.root+".")
		switch lane {
		case ownerLane:
			g.owner, g.at = new(ownerPost), m.Seq
			return json.Unmarshal(m.Data, g.owner)
		case recallLane:
			return nil
		}
		p, err := parseLane(m)
		g.lanes[lane] = laneAt{p, m.Seq}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the gate: %w", err)
	}
	return g, nil
}

// own returns the lanes that the gate's owner has written.
func (g *gate) own() map[string]laneAt {
	own := maps.Clone(g.lanes)
	maps.DeleteFunc(own, func(_ string, l laneAt) bool { return g.owner == nil || l.holder != g.owner.holder })
	return own
}

// last returns the newest event that the gate has let through.
func (g *gate) last() (seq uint64) {
	if g.owner != nil {
		seq = seqOf(g.owner.Last)
	}
	for _, l := range g.own() {
		seq = max(seq, l.Last)
	}
	return seq
}

// let returns how many events the gate has let through.
func (g *gate) let() (n int64) {
	if g.owner != nil {
		n = g.owner.Let
	}
	for _, l := range g.own() {
		n += l.Let
	}
	return n
}

// events returns the sequences of events that must be in the stream if it has lost nothing: the last one, and the one
// that its lane knew of before. A purge that a publish has overtaken removes the latter.
func (g *gate) events() []uint64 {
	list := []uint64{g.last()}
	for _, l := range g.own() {
		if l.Last == list[0] {
			list = append(list, l.Prev)
		}
	}
	return list
}

// lacks reports whether a stream has lost one of its messages. Those that are before its first one were trimmed.
func (c *conn) lacks(ctx context.Context, name string, seqs ...uint64) (bool, error) {
	for _, seq := range seqs {
		if seq == 0 {
			continue
		}
		m, err := c.getAny(ctx, name, getRequest{Seq: seq})
		if m != nil {
			continue
		}
		var info *js.StreamInfo
		if err == nil {
			info, err = c.info(ctx, name)
		}
		switch {
		case hasCode(err, js.JSErrCodeStreamNotFound):
			return true, nil
		case err != nil:
			return false, err
		case seq >= info.State.FirstSeq || info.State.LastSeq < seq:
			return true, nil
		}
	}
	return false, nil
}

// limited returns the setting by which a stream would remove messages that the gate needs; "" without one.
func limited(c *js.StreamConfig) string {
	switch {
	case c.Retention != js.LimitsPolicy:
		return "retention " + strings.ToLower(c.Retention.String())
	case c.MaxAge > 0:
		return "max_age"
	case c.MaxMsgsPerSubject > 0:
		return "max_msgs_per_subject"
	case c.MaxMsgs > 0 && c.Discard != js.DiscardNew:
		return "max_msgs without discard new"
	case c.MaxBytes > 0 && c.Discard != js.DiscardNew:
		return "max_bytes without discard new"
	}
	return ""
}

// ensure makes a stream that does not exist, and gives one that another program has made what the gate needs.
func (s *Sink) ensure(ctx context.Context, c *conn, stream string, g *gate) error {
	if g.root != "" && g.info.Config.AllowAtomicPublish && g.info.Config.AllowDirect && limited(&g.info.Config) == "" {
		return nil
	}
	name := StreamName(stream)
	if g.info != nil && limited(&g.info.Config) != "" {
		return &outbox.StreamError{Stream: stream, Err: fmt.Errorf("the JetStream stream %s has %s, which removes "+
			"what the gate needs%sremove the setting: Trim shortens the stream",
			name, limited(&g.info.Config), outbox.RemedyMark)}
	}
	subjects := []string{EventsFilter(stream)}
	if g.info != nil {
		subjects = g.info.Config.Subjects
	}
	if g.root == "" {
		subjects = append(subjects, gateRoot+name+"."+rand.Text()+".*")
	}
	var err error
	if g.info == nil {
		err = s.make(ctx, c, js.StreamConfig{Name: name, Subjects: subjects, AllowAtomicPublish: true})
	} else {
		var info struct{ Config map[string]any } // the client may not know all settings
		if err = c.call(ctx, "STREAM.INFO."+name, struct{}{}, &info); err == nil {
			info.Config["subjects"], info.Config["allow_atomic"], info.Config["allow_direct"] = subjects, true, true
			err = c.call(ctx, "STREAM.UPDATE."+name, info.Config, &js.StreamInfo{})
		}
	}
	if err != nil {
		return fmt.Errorf("configure the JetStream stream %s with allow_atomic, allow_direct and the subjects %s: %w",
			name, strings.Join(subjects, ", "), err)
	}
	again, err := c.read(ctx, stream)
	if err != nil {
		return err
	}
	if again.root == "" {
		return errors.New("the JetStream stream " + name + " is being made by another process")
	}
	*g = *again
	return nil
}
