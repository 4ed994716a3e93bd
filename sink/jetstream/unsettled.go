package jetstream

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
)

// unsettled returns the spans of a gate's doubt and of the batches that are not settled, of earlier claims as well. It
// reads messages of lanes only.
func (c *conn) unsettled(ctx context.Context, g *gate) ([]span, error) {
	spans := slices.Clone(g.owner.spans(g.at))
	for lane, l := range g.own() {
		own, err := c.batches(ctx, g.name, g.subject(lane), l, l.Settled)
		if err != nil {
			return nil, err
		}
		spans = append(spans, spansOf(slices.Concat(l.Inherited, own))...)
	}
	return join(spans), nil
}

// spansOf returns the spans of batches.
func spansOf(batches []inherited) (spans []span) {
	for _, b := range batches {
		spans = append(spans, b.span)
	}
	return join(spans)
}

// join sorts spans and joins those without messages between them.
func join(spans []span) (joined []span) {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.From, b.From) })
	for _, s := range spans {
		if n := len(joined); n > 0 && s.From <= joined[n-1].To+1 {
			joined[n-1].To = max(joined[n-1].To, s.To)
			continue
		}
		joined = append(joined, s)
	}
	return joined
}

// batches returns the batches of the lane's present claim with numbers after settled.
func (c *conn) batches(ctx context.Context, name, subject string, l laneAt, settled int64) (
	own []inherited, err error,
) {
	if l.Number <= settled {
		return nil, nil
	}
	req := getRequest{Seq: l.Since + 1, NextFor: subject}
	err = c.scan(ctx, name, req, func(m *message) error {
		p, err := parseLane(m)
		if err != nil {
			return err
		}
		if p.holder == l.holder && p.Claim == l.Claim && p.Batch != "" && p.Number > settled {
			own = append(own, inherited{
				span: span{From: m.Seq - p.Stored, To: m.Seq}, Claim: p.Claim, Number: p.Number,
			})
		}
		if m.Seq >= l.seq {
			return errStop
		}
		return nil
	})
	return own, err
}

// ids passes the events of spans to visit, with their entries; "" for those that are only listed as repeated.
func (c *conn) ids(ctx context.Context, name, root string, spans []span, visit func(id uuid.UUID, entry string)) error {
	for _, s := range spans {
		req := getRequest{Seq: s.From, Batch: int(min(s.To-s.From, pageMessages)) + 1}
		err := c.scan(ctx, name, req, func(m *message) error {
			if m.Seq > s.To {
				return errStop
			}
			if strings.HasPrefix(m.Subject, root+".") {
				var p lanePost
				if err := json.Unmarshal(m.Data, &p); err != nil {
					return err
				}
				for list := p.Repeated; len(list) >= 16; list = list[16:] {
					visit(uuid.UUID(list[:16]), "")
				}
			} else if id, ok := m.event(); ok {
				visit(id, m.entry())
			}
			if m.Seq == s.To {
				return errStop
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("read unsettled events: %w", err)
		}
	}
	return nil
}

// spans returns the doubt of an owner's message, which is at seq.
func (p *ownerPost) spans(seq uint64) []span {
	spans := p.Doubt
	if p.Recalls > 0 {
		spans = join(append(append([]span{}, spans...), span{From: seq - p.Recalls, To: seq}))
	}
	return spans
}
