package model

import (
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"strings"
)

// machine explores the states of a plan.
type machine struct {
	plan  plan
	parts int8
	// broken is the removed safeguard, "" for none.
	broken string
	// prefix are the labels of the first steps, in part; "" for none.
	prefix string
	// observed: relays keep their indexes, because a test watches them. Otherwise states that differ only in the
	// order of relays are the same, and a relay that can do nothing more is removed.
	observed bool
	// labels: steps have descriptions.
	labels bool
	out    []successor
}

type successor struct {
	state state
	label string
}

// without reports whether a safeguard is removed.
func (m *machine) without(safeguard string) bool { return m.broken == safeguard }

func (m *machine) emit(s *state, format string, args ...any) {
	var label string
	if m.labels {
		label = fmt.Sprintf(format, args...)
	}
	m.out = append(m.out, successor{*s, label})
	next := &m.out[len(m.out)-1].state
	m.normalize(next)
	m.compare(next)
}

// normalize maps states with the same future to one state.
func (m *machine) normalize(s *state) {
	// These faults may give an old owner its gate or its state back.
	prune := !m.observed && m.broken == "" && s.budget.rdBack == 0 && s.budget.pgBack == 0
	for i := range s.procs {
		p := &s.procs[i]
		if p.pc == idle {
			*p = proc{}
			continue
		}
		// A relay that holds no lock, and can neither publish nor write, is removed.
		if prune && int(s.leader) != i+1 && !p.assistant && p.flying == (call{}) &&
			!m.owner(s, p.epoch, p.nonce) && p.epoch < s.rd.gate.epoch {
			*p = proc{}
		}
	}
	if s.late != (call{}) && prune && s.late.epoch < s.rd.gate.epoch {
		s.late = call{}
	}
	if !m.observed && s.procs[0].pc == idle && s.procs[1].pc != idle {
		s.procs[0], s.procs[1] = s.procs[1], s.procs[0]
		if s.leader > 0 {
			s.leader = 3 - s.leader
		}
	}
	if s.budget.pgBack == 0 {
		s.standby = postgres{}
	}
	if s.hung.part > 0 && (s.hung.server != s.server || prune && !m.owner(s, s.hung.epoch, s.hung.nonce)) {
		s.hung = statement{}
	}
}

// compare records the rows that the marks hold, and those that they no longer hold.
func (m *machine) compare(s *state) {
	var held set
	for e := range int8(len(m.plan.events)) {
		if s.pg.tx[m.plan.events[e].tx].phase == visible && m.settled(&s.pg, e) {
			held = held.with(e)
		}
	}
	s.back = s.back || s.held&^held != 0
	s.held |= held
	s.sent |= s.rd.ids()
}

func (m *machine) steps(s *state) []successor {
	m.out = m.out[:0]
	m.write(s)
	m.fail(s)
	m.relay(s)
	return m.out
}

func (m *machine) start(b budget) state {
	s := state{budget: b}
	s.pg.next, s.pg.ended = 1, 1
	s.rd.gate.whole = true
	if m.prefix == "" {
		return s
	}
	m.labels = true
	defer func() { m.labels = false }()
	for part := range strings.SplitSeq(m.prefix, "; ") {
		i := slices.IndexFunc(m.steps(&s), func(n successor) bool { return strings.Contains(n.label, part) })
		if i < 0 {
			panic("no such step: " + part)
		}
		s = m.out[i].state
	}
	return s
}

// explore visits every state within the budget, breadth first. It returns their number and, for a violation, its
// description and the steps that lead to it. It stops after most states. A state is identified by a hash of 64 bits:
// with a million states, one in thirty million runs overlooks one.
func (m *machine) explore(b budget, most int) (states int, wrong string, trace []string) {
	type origin struct{ from, which int32 }
	type waiting struct {
		state
		at int32
	}
	seed := maphash.MakeSeed()
	first := m.start(b)
	known := map[uint64]bool{maphash.Comparable(seed, first): true}
	frontier, origins := []waiting{{first, 0}}, []origin{{-1, 0}}
	var following []waiting
	for len(frontier) > 0 && len(known) < most {
		for i := range frontier {
			w := &frontier[i]
			next := m.steps(&w.state)
			if wrong = m.judge(&w.state, len(next) == 0); wrong != "" {
				var path []int32
				for at := w.at; at > 0; at = origins[at].from {
					path = append(path, origins[at].which)
				}
				return len(known), wrong, m.retrace(first, path)
			}
			for which := range next {
				n := &next[which].state
				if h := maphash.Comparable(seed, *n); !known[h] {
					known[h] = true
					following = append(following, waiting{*n, int32(len(origins))})
					origins = append(origins, origin{w.at, int32(which)})
				}
			}
		}
		frontier, following = following, frontier[:0]
	}
	return len(known), "", nil
}

// retrace describes the steps of a path, which is given from its end.
func (m *machine) retrace(s state, path []int32) (labels []string) {
	m.labels = true
	defer func() { m.labels = false }()
	for _, which := range slices.Backward(path) {
		next := m.steps(&s)[which]
		labels = append(labels, next.label)
		s = next.state
	}
	return labels
}

// judge describes a violation in a state. last: nothing more can happen.
func (m *machine) judge(s *state, last bool) string {
	if s.needless {
		return "a relay adopts for an event that was not missing"
	}
	if s.back {
		return "a mark holds less than before"
	}
	ids := s.rd.ids()
	var seen set
	for i, n := range s.rd.stream[:s.rd.len] {
		e := n - 1
		if seen.has(e) {
			return fmt.Sprintf("event %d is in the stream twice", n)
		}
		seen = seen.with(e)
		for _, o := range s.rd.stream[:i] {
			a, b := m.plan.events[o-1], m.plan.events[e]
			if a.aggregate == b.aggregate && o-1 > e && s.pg.tx[a.tx].phase != lost && !s.pg.dead.has(e) &&
				s.pg.tx[b.tx].phase != lost && !s.pg.tx[b.tx].silent { // its order cannot be known
				return fmt.Sprintf("event %d is behind event %d", n, o)
			}
		}
		t, again := s.pg.tx[m.plan.events[e].tx], s.timeline > 0 // its commit may have been lost
		if t.phase < written || t.phase == written && !again || t.phase == aborted {
			return fmt.Sprintf("event %d is in the stream, and was not committed", n)
		}
	}
	for e := range int8(len(m.plan.events)) {
		_, _, there := m.row(&s.pg, e)
		id := m.plan.events[e].of
		if ids.has(id) && m.parked(&s.pg, e) && !m.retrying(s, e) {
			return fmt.Sprintf("event %d is parked, and in the stream", e+1)
		}
		if ids.has(id) || s.pg.tx[m.plan.events[e].tx].phase != visible || s.pg.dead.has(e) {
			continue
		}
		if m.settled(&s.pg, e) && !s.sent.has(id) {
			return fmt.Sprintf("event %d is settled, and was never in the stream", e+1)
		}
		if s.pg.dropped.has(e) {
			return fmt.Sprintf("the row of event %d is dropped, and it is not in the stream", e+1)
		}
		whole := s.rd.gate.whole && s.pg.timeline == s.timeline &&
			s.rd.gate.n >= s.pg.n && s.rd.gate.epoch >= s.pg.raised
		if there && whole && m.settled(&s.pg, e) {
			return fmt.Sprintf("event %d is settled, and not in the stream", e+1)
		}
		if last && !m.waits(s, e) {
			return fmt.Sprintf("nothing more happens, and event %d is not in the stream", e+1)
		}
	}
	if last {
		return m.rest(s)
	}
	return ""
}

// rest describes a violation in a state in which nothing more can happen.
func (m *machine) rest(s *state) string {
	if s.leader == 0 {
		return "nobody leads"
	}
	for e := range int8(len(m.plan.events)) {
		if _, _, there := m.row(&s.pg, e); there && !m.parked(&s.pg, e) && !m.settled(&s.pg, e) &&
			!m.waits(s, e) {
			return fmt.Sprintf("nothing more happens, and event %d is not settled", e+1)
		}
	}
	p := s.procs[s.leader-1]
	if p.published != 0 {
		return "nothing more happens, and what was published is not settled"
	}
	if p.pc == streaming && s.pg.slot < s.pg.len && !slices.ContainsFunc(m.plan.txs, func(t writer) bool {
		return t.stuck && !s.cured
	}) {
		return "nothing more happens, and the slot holds WAL back"
	}
	return ""
}

func (m *machine) stream(r *redis) string {
	var b strings.Builder
	for _, e := range r.stream[:r.len] {
		fmt.Fprintf(&b, " %d", e)
	}
	return "[" + strings.TrimSpace(b.String()) + "]"
}

// wander takes random steps, until nothing more can happen or for 400 steps.
func (m *machine) wander(b budget, random *rand.Rand) (wrong string, trace []string) {
	s := m.start(b)
	var path []int32
	for range 400 {
		next := m.steps(&s)
		if wrong = m.judge(&s, len(next) == 0); wrong != "" {
			slices.Reverse(path)
			return wrong, m.retrace(m.start(b), path)
		}
		if len(next) == 0 {
			break
		}
		which := random.IntN(len(next))
		path = append(path, int32(which))
		s = next[which].state
	}
	return "", nil
}
