package idem

import (
	"fmt"
	"testing"
)

// A model of the guard with the database: three attempts at one operation, up to two crashes, lost keys, an outage,
// lost replies, leases that end at any time, in every order. It says which part of the design carries which promise:
// the unique index makes a double order impossible, and the fence keeps two attempts from working under valid leases.

// mutation takes a part of the design away.
type mutation struct {
	name string
	// noIndex: the table has no unique key.
	noIndex bool
	// noFence: a release deletes the pending record of any owner.
	noFence bool
	// noLease: a pending record is taken over although its lease runs.
	noLease bool
}

const attempts = 3

// The next step of an attempt.
const (
	atStart = iota
	atWork  // has a ticket
	atCommit
	atResolve // its COMMIT was not answered
	atRelease // its failure was definite
	atReply
	atPublish
	atEnd
)

type attempt struct {
	at    uint8
	token uint8
	// valid: it works under a lease that has not ended.
	valid bool
	// got is the order it answers with, counted from 1.
	got uint8
}

type state struct {
	// kind of the record: none, 'P' or 'C'.
	kind                     uint8
	owner, ref, nextToken    uint8
	expired                  bool
	rows                     [attempts]bool
	a                        [attempts]attempt
	crashes, losses, outages uint8
}

// violation names the broken promise, "" for none.
func (s *state) violation() string {
	rows, valid, got := 0, 0, uint8(0)
	for i := range s.a {
		if s.rows[i] {
			rows++
		}
		if s.a[i].valid {
			valid++
		}
		if g := s.a[i].got; g != 0 {
			if got != 0 && got != g {
				return "two answers"
			}
			if !s.rows[g-1] {
				return "an answer without an order"
			}
			got = g
		}
	}
	switch {
	case rows > 1:
		return "two orders"
	case s.kind == 'C' && !s.rows[s.ref-1]:
		return "a record without an order"
	case valid > 1:
		return "two valid leases"
	}
	return ""
}

// row returns the committed order, counted from 1; 0 for none.
func (s *state) row() uint8 {
	for i, committed := range s.rows {
		if committed {
			return uint8(i + 1)
		}
	}
	return 0
}

// locked reports whether another attempt's transaction holds the key.
func (s *state) locked(i int) bool {
	for j := range s.a {
		if j != i && s.a[j].at == atCommit {
			return true
		}
	}
	return false
}

// next returns every state that one step leads to.
func (m mutation) next(s state) (out []state) {
	add := func(f func(t *state)) {
		t := s
		f(&t)
		out = append(out, t)
	}
	for i := range s.a {
		if s.a[i].at == atEnd {
			continue
		}
		m.step(s, i, func(f func(t *state, a *attempt)) { add(func(t *state) { f(t, &t.a[i]) }) })
		if s.crashes < 2 {
			add(func(t *state) { t.crashes++; t.a[i].end() })
		}
	}
	if s.kind == 'P' && !s.expired {
		add(func(t *state) { t.expire() })
	}
	if s.kind != 0 && s.losses < 2 {
		add(func(t *state) { t.losses++; t.expire(); t.kind, t.expired = 0, false })
	}
	return out
}

func (a *attempt) end() { a.at, a.valid = atEnd, false }

// expire ends the lease of the record's owner.
func (s *state) expire() {
	s.expired = true
	for i := range s.a {
		if s.a[i].token == s.owner {
			s.a[i].valid = false
		}
	}
}

func (s *state) acquire(a *attempt) {
	s.nextToken++
	s.kind, s.owner, s.expired = 'P', s.nextToken, false
	a.at, a.token, a.valid = atWork, s.nextToken, true
}

// step adds what attempt i can do.
func (m mutation) step(s state, i int, add func(func(t *state, a *attempt))) {
	switch s.a[i].at {
	case atStart:
		m.start(s, add)
	case atWork, atResolve:
		m.insert(s, i, add)
		if s.a[i].at == atWork {
			add(func(_ *state, a *attempt) { a.at = atRelease }) // a definite failure, a lock timeout
		} else {
			add(func(_ *state, a *attempt) { a.end() }) // still unknown: the record is kept
		}
	case atCommit:
		add(func(t *state, a *attempt) { t.rows[i], a.at, a.got = true, atReply, uint8(i+1) })
		add(func(t *state, a *attempt) { t.rows[i], a.at = true, atResolve })
		add(func(_ *state, a *attempt) { a.at = atResolve })
		add(func(_ *state, a *attempt) { a.at = atRelease })
	case atRelease:
		add(func(t *state, a *attempt) {
			if t.kind == 'P' && (t.owner == a.token || m.noFence) {
				t.kind = 0
			}
			a.end()
		})
	case atReply:
		add(func(_ *state, a *attempt) { a.at, a.valid = atPublish, false })
	case atPublish:
		add(func(t *state, a *attempt) {
			if t.kind != 'C' {
				t.expire()
				t.kind, t.ref = 'C', a.got
			}
			a.end()
		})
	}
}

func (m mutation) start(s state, add func(func(t *state, a *attempt))) {
	switch {
	case s.kind == 'C':
		add(func(t *state, a *attempt) { a.got = t.ref; a.end() })
	case s.kind == 0 || s.expired || m.noLease:
		add(func(t *state, a *attempt) { t.acquire(a) })
	default: // busy: it queries the database, and gives up
		add(func(t *state, a *attempt) { a.got = t.row(); a.end() })
	}
	if s.outages < 1 {
		add(func(t *state, a *attempt) { t.outages++; a.at = atWork })
	}
}

func (m mutation) insert(s state, i int, add func(func(t *state, a *attempt))) {
	row := s.row()
	if m.noIndex {
		row = 0
		if s.rows[i] { // the primary key is its own
			row = uint8(i + 1)
		}
	} else if s.locked(i) {
		return
	}
	add(func(_ *state, a *attempt) {
		if row != 0 {
			a.at, a.got = atReply, row
		} else {
			a.at = atCommit
		}
	})
}

// explore visits every reachable state and returns the violations with how often each was seen.
func (m mutation) explore() (visited int, broken map[string]int) {
	broken = map[string]int{}
	seen := map[state]bool{{}: true}
	todo := []state{{}}
	for len(todo) > 0 {
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if v := s.violation(); v != "" {
			broken[v]++
			continue
		}
		for _, t := range m.next(s) {
			if !seen[t] {
				seen[t] = true
				todo = append(todo, t)
			}
		}
	}
	return len(seen), broken
}

func TestModel(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mutation
		want string
	}{
		{mutation{name: "as designed"}, ""},
		{mutation{name: "without the unique index", noIndex: true}, "two orders"},
		{mutation{name: "release without the fence", noFence: true}, "two valid leases"},
		{mutation{name: "takeover of a running lease", noLease: true}, "two valid leases"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			visited, broken := c.explore()
			t.Logf("%d states, broken: %v", visited, broken)
			if c.want == "" && len(broken) > 0 || c.want != "" && broken[c.want] == 0 {
				t.Errorf("broken promises %v, want %q", fmt.Sprint(broken), c.want)
			}
		})
	}
}
