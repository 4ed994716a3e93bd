package prove

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"posthaste/internal/cli"
	"posthaste/internal/lab/oracle"
	"posthaste/outbox"
)

// fault is one kind of fault.
type fault struct {
	name string
	// about describes the fault for users.
	about string
	class class
	// touches is the part of the system that the fault uses exclusively: the two faults of a pair touch different
	// parts.
	touches string
	// least and most bound the fault's duration in seconds. If both are 0, the fault is a single event.
	least, most float64
	// inject starts the fault, makes its random choices, and returns what it chose. heal ends the fault; it is nil if
	// nothing must be undone.
	inject injection
}

func kind(name, about string, class class, touches string, least, most float64, inject injection) *fault {
	return &fault{name, about, class, touches, least, most, inject}
}

// class is where a fault may be injected, and what it may do.
type class int

// The classes of faults.
const (
	// anywhere needs no control of the servers and does not affect other users of them.
	anywhere class = iota
	// own is for servers that the campaign has started.
	own
	// forgets is own, and the server may lose acknowledged writes.
	forgets
	// sabotage breaks a promise from outside the product, to show that a campaign detects it. It must be chosen by
	// name: all does not include it.
	sabotage
)

// injection is fault.inject.
type injection func(ctx context.Context, c *campaign, r *rand.Rand) (what string, heal healing, err error)

// healing ends a fault.
type healing func(ctx context.Context) error

// The parts of the system that faults touch.
const (
	touchesRelays    = "relays"
	touchesServe     = "serve"
	touchesConsumers = "consumers"
	touchesMode      = "mode"
	touchesLinks     = "links"
	touchesSlot      = "slot"
	touchesPostgres  = "postgres"
	touchesSessions  = "sessions"
	touchesRedis     = "redis"
	touchesNats      = "nats"
	touchesLoad      = "load"
	// touchesAll is for a fault that is not paired.
	touchesAll = "all"
)

// chooseFaults returns the faults in a list of names; a name may end in *. If external is true, it allows only faults
// that are safe on servers which other users share.
func chooseFaults(names string, external bool, sink string) ([]*fault, error) {
	all := slices.DeleteFunc(slices.Clone(faults), func(f *fault) bool {
		return external && f.class != anywhere || f.class == sabotage && (names == "all" || names == "") ||
			!f.suits(sink)
	})
	if names == "all" || names == "" {
		return all, nil
	}
	var list []*fault
	for name := range strings.SplitSeq(names, ",") {
		n := len(list)
		for _, f := range all {
			prefix, family := strings.CutSuffix(name, "*")
			if (f.name == name || family && strings.HasPrefix(f.name, prefix)) && !slices.Contains(list, f) {
				list = append(list, f)
			}
		}
		if len(list) == n {
			return nil, cli.Usage(fmt.Sprintf("--faults: there is no new fault %q; there are %s, and all", name,
				namesOf(all)))
		}
	}
	return list, nil
}

// namesOf lists the names of faults.
func namesOf(faults []*fault) string {
	names := make([]string, len(faults))
	for i, f := range faults {
		names[i] = f.name
	}
	return strings.Join(names, ", ")
}

// suits reports whether a campaign that publishes to that sink has the fault. With NATS, Redis has no streams, and its
// losses concern the credits only; posthaste adopt, which a move to another server needs, does not know JetStream.
func (f *fault) suits(sink string) bool {
	if sink != sinkNats {
		return f.touches != touchesNats
	}
	return (f.touches != touchesRedis || f.class != forgets) && f.name != "sabotage-group" && f.name != "database-moved"
}

// shot is one fault of a round: the plan for it, and its course.
type shot struct {
	Fault  string    `json:"fault"`
	What   string    `json:"what,omitempty"`
	At     time.Time `json:"at"`
	Healed time.Time `json:"healed,omitzero"`
	Failed string    `json:"failed,omitempty"`

	fault *fault
	// seed determines the fault's own choices, so that one fault's choices do not affect another's.
	seed uint64
	hold time.Duration
}

// round is one step of a campaign: one fault or two, and the pauses between and after them.
type round struct {
	Number    int         `json:"round"`
	Mode      outbox.Mode `json:"mode"`
	At        time.Time   `json:"at"`
	Faults    []*shot     `json:"faults"`
	Healed    time.Time   `json:"healed"`
	Recovered time.Time   `json:"recovered"`

	// gap is the time between the beginnings of the first and the second fault.
	gap time.Duration
	// rest is the pause after the round.
	rest time.Duration
}

// plan chooses the rounds. It depends only on the seed and the faults.
type plan struct {
	rand   *rand.Rand
	faults []*fault
	deck   []*fault
	number int
	mode   outbox.Mode
}

func newPlan(seed uint64, faults []*fault) *plan {
	return &plan{rand: oracle.Random(seed, 0), faults: faults, mode: outbox.ModeAuto}
}

// draw returns the next fault. Every fault is drawn once before any is drawn again.
func (p *plan) draw() *fault {
	if len(p.deck) == 0 {
		p.deck = slices.Clone(p.faults)
		p.rand.Shuffle(len(p.deck), func(i, j int) { p.deck[i], p.deck[j] = p.deck[j], p.deck[i] })
	}
	f := p.deck[0]
	p.deck = p.deck[1:]
	return f
}

func (p *plan) next() *round {
	p.number++
	r := &round{Number: p.number, gap: p.between(0, 2*time.Second), rest: p.between(0, 2*time.Second)}
	if p.rand.IntN(4) == 0 {
		if p.mode = outbox.ModePoll; p.rand.IntN(2) == 0 {
			p.mode = outbox.ModeAuto
		}
	}
	r.Mode = p.mode
	r.Faults = append(r.Faults, p.shot(p.draw()))
	if p.rand.IntN(3) > 0 {
		return r
	}
	if second := p.faults[p.rand.IntN(len(p.faults))]; !second.clashes(r.Faults[0].fault) {
		r.Faults = append(r.Faults, p.shot(second))
	}
	return r
}

// clashes reports whether the two faults cannot be a pair.
func (f *fault) clashes(with *fault) bool {
	return f.touches == with.touches || f.touches == touchesAll || with.touches == touchesAll
}

func (p *plan) shot(f *fault) *shot {
	return &shot{Fault: f.name, fault: f, seed: p.rand.Uint64(), hold: p.between(seconds(f.least), seconds(f.most))}
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// between returns a random time between least and most.
func (p *plan) between(least, most time.Duration) time.Duration {
	if most <= least {
		return least
	}
	return (least + time.Duration(p.rand.Int64N(int64(most-least)))).Round(time.Millisecond)
}

// names returns the names of the round's faults, such as "redis-kill + relay-stop".
func (r *round) names() string {
	list := make([]string, len(r.Faults))
	for i, s := range r.Faults {
		list[i] = s.Fault
	}
	return strings.Join(list, " + ")
}

// forgets reports whether a fault of the round may make the sink lose data.
func (r *round) forgets() bool {
	return slices.ContainsFunc(r.Faults, func(s *shot) bool { return s.fault.class == forgets })
}
