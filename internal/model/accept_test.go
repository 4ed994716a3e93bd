package model

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// This file checks recorded steps of real relays against the machine that is explored.

// op is what a process did between two lines of a log. It took effect at one moment in between or, if it was never
// answered, at any later moment or never.
type op struct {
	// says describes it.
	says string
	// apply returns the states that it leads to from s.
	apply func(w *watch, s state) []state
	// end is the line of its answer; 0 without one.
	begin, end int
	bit        uint64
}

// watch follows a log through all states that the machine can be in.
type watch struct {
	*machine
	ops []*op
	now map[config]bool
}

// config is a state, with the open operations that have taken effect.
type config struct {
	state
	done uint64
}

// plenty is a budget that is never used up.
var plenty = budget{crash: 9, lock: 9, toggle: 9, assist: 9, give: 9}

func newWatch(plan string) *watch {
	w := &watch{machine: newMachine(plan, "")}
	w.observed, w.labels = true, true
	w.now = map[config]bool{{state: w.start(plenty)}: true}
	return w
}

// next returns the steps of a state whose label has the prefix and contains parts.
func (w *watch) next(s state, prefix string, parts ...string) (list []state) {
	for _, n := range w.steps(&s) {
		if strings.HasPrefix(n.label, prefix) &&
			!slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(n.label, p) }) {
			n.state.budget = plenty
			list = append(list, n.state)
		}
	}
	return list
}

// silent returns the steps that leave no line.
func (w *watch) silent(s state) (list []state) {
	for _, n := range w.steps(&s) {
		quiet := n.label == "the WAL is on disk"
		for _, text := range []string{
			": it is settled", "comes to event", "passes what is not for it", "sweeps along", "has nothing to move",
			"has drained its pass", "back, whatever",
		} {
			quiet = quiet || strings.Contains(n.label, text)
		}
		for i, p := range s.procs { // it has seen that the leader does something else
			quiet = quiet || p.assistant && n.label == fmt.Sprintf("relay %d is killed", i+1)
		}
		if quiet {
			n.state.budget = plenty
			list = append(list, n.state)
		}
	}
	return list
}

// spread adds every state that silent steps and open operations can lead to.
func (w *watch) spread(open []*op) {
	todo := make([]config, 0, len(w.now))
	for c := range w.now {
		todo = append(todo, c)
	}
	add := func(c config) {
		if !w.now[c] {
			w.now[c] = true
			todo = append(todo, c)
		}
	}
	for len(todo) > 0 {
		c := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, s := range w.silent(c.state) {
			add(config{s, c.done})
		}
		for _, o := range open {
			if c.done&o.bit == 0 {
				for _, s := range o.apply(w, c.state) {
					add(config{s, c.done | o.bit})
				}
			}
		}
	}
}

// accept checks the operations against the machine. It returns "" or the first operation that no state allows.
func (w *watch) accept() (refused string, most int) {
	last := 0
	for _, o := range w.ops {
		last = max(last, o.begin, o.end)
	}
	var open []*op
	var used uint64
	for line := 1; line <= last; line++ {
		for _, o := range w.ops {
			if o.begin == line {
				o.bit = 1 << bits.TrailingZeros64(^used)
				used |= o.bit
				open = append(open, o)
			}
		}
		for _, o := range w.ops {
			if o.end != line {
				continue
			}
			before := w.now
			w.spread(open)
			most = max(most, len(w.now))
			after := map[config]bool{}
			for c := range w.now {
				if c.done&o.bit != 0 {
					c.done &^= o.bit
					after[c] = true
				}
			}
			if len(after) == 0 {
				return fmt.Sprintf("line %d: %s\n%s", line, o.says, w.describe(before)), most
			}
			w.now = after
			used &^= o.bit
			open = slices.DeleteFunc(open, func(p *op) bool { return p == o })
		}
	}
	return "", most
}

// describe lists the possible states of the machine, and their steps.
func (w *watch) describe(now map[config]bool) string {
	var b strings.Builder
	n := 0
	for c := range now {
		if n++; n > 3 {
			break
		}
		fmt.Fprintf(&b, "\tstream %s, gate of epoch %d, leader %d, doubt %s; the relays are at %d and %d, and could:\n",
			w.stream(&c.rd), c.rd.gate.epoch, c.leader, w.names(c.rd.gate.doubt), c.procs[0].pc, c.procs[1].pc)
		for _, s := range w.steps(&c.state) {
			fmt.Fprintf(&b, "\t\t%s\n", s.label)
		}
	}
	return b.String()
}

// publish is a call of publish.lua: each event is sent and arrives, or is refused. fresh is how many of them were
// added to the stream.
func publish(relay int, lane int8, events []int8, fresh int, refused bool) func(w *watch, s state) []state {
	return func(w *watch, s state) []state {
		if refused {
			step := fmt.Sprintf("relay %d sends event %d in lane %d", relay, events[0]+1, lane)
			for _, sent := range w.next(s, step) {
				if len(w.next(sent, fmt.Sprintf("event %d arrives", events[0]+1))) > 0 {
					return nil // the machine would have published it
				}
			}
			return []state{s}
		}
		list := []state{s}
		for _, e := range events {
			var after []state
			for _, at := range list {
				if p := &at.procs[relay-1]; p.pc == streaming { // silent steps pass other events
					list := w.passing(at, relay)
					for _, q := range list {
						after = append(after, w.sent(q, relay, lane, e)...)
					}
					continue
				}
				after = append(after, w.sent(at, relay, lane, e)...)
			}
			list = after
		}
		return slices.DeleteFunc(list, func(t state) bool { return int(t.rd.len-s.rd.len) != fresh })
	}
}

func (w *watch) passing(s state, relay int) []state {
	list := []state{s}
	for i := 0; i < len(list); i++ {
		for _, text := range []string{": it is settled", "passes what is not", "comes to event"} {
			for _, n := range w.next(list[i], fmt.Sprintf("relay %d ", relay), text) {
				if !slices.Contains(list, n) {
					list = append(list, n)
				}
			}
		}
	}
	return list
}

func (w *watch) sent(s state, relay int, lane, e int8) (list []state) {
	for _, sent := range w.next(s, fmt.Sprintf("relay %d sends event %d in lane %d", relay, e+1, lane)) {
		list = append(list, w.next(sent, fmt.Sprintf("event %d arrives", e+1))...)
	}
	return list
}

// marked is a step that writes a mark. held are the events of the set of that it holds.
func marked(step string, held, of set) func(w *watch, s state) []state {
	return func(w *watch, s state) []state {
		return slices.DeleteFunc(w.next(s, step), func(t state) bool {
			for e := range int8(len(w.plan.events)) {
				_, _, seen := w.row(&t.pg, e)
				if of.has(e) && seen && held.has(e) != w.settled(&t.pg, e) || of.has(e) && !seen && held.has(e) {
					return true
				}
			}
			return false
		})
	}
}

// not is a step that was refused: if the machine allows it, not leads to no state.
func not(step string) func(w *watch, s state) []state {
	return func(w *watch, s state) []state {
		if len(w.next(s, step)) > 0 {
			return nil
		}
		return []state{s}
	}
}

// either is a step that may or may not have been taken: the log does not show which.
func either(step string, parts ...string) func(w *watch, s state) []state {
	return func(w *watch, s state) []state { return append(w.next(s, step, parts...), s) }
}
