package prove

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"posthaste/internal/cli"
	"posthaste/outbox"
)

// fault is one kind of trouble.
type fault struct {
	name string
	// about is what it does, for people.
	about string
	// touches is what it takes for itself: the two faults of a pair touch different things.
	touches string
	// least and most are how long it lasts; both 0: it happens at once.
	least, most time.Duration
	// forgets: Redis may lose what it has answered.
	forgets bool
	// inject does it, with its own choices, and says to what. heal ends it; nil if there is nothing to end.
	inject func(ctx context.Context, c *campaign, r *rand.Rand) (what string, heal healing, err error)
}

// healing ends a fault.
type healing func(ctx context.Context) error

// What faults touch.
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
	touchesLoad      = "load"
)

// allFaults are the faults there are, in the order in which they are listed.
func allFaults() []*fault { return slices.Concat(externalFaults(), postgresFaults(), redisFaults()) }

// externalFaults are those that need no hand on the servers, and harm nobody else there.
func externalFaults() []*fault {
	return slices.Concat(processFaults(), linkFaults(), sessionFaults(), loadFaults())
}

// chooseFaults returns those of a list of names, which may end in *. External is for servers of somebody else's.
func chooseFaults(names string, external bool) ([]*fault, error) {
	all := allFaults()
	if external {
		all = externalFaults()
	}
	if names == "all" || names == "" {
		return all, nil
	}
	if !external {
		all = append(all, sabotages()...)
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
			known := make([]string, len(all))
			for i, f := range all {
				known[i] = f.name
			}
			return nil, cli.Usage(fmt.Sprintf("--faults: there is no new fault %q; there are %s, and all", name,
				strings.Join(known, ", ")))
		}
	}
	return list, nil
}

// shot is one fault of a plan.
type shot struct {
	fault *fault
	// seed is for its own choices, so that what one fault chooses changes no other.
	seed uint64
	hold time.Duration
}

// round is what is done at a time: one fault or two, and what comes before and after.
type round struct {
	number int
	mode   outbox.Mode
	shots  []shot
	// gap is how long after the first fault the second begins.
	gap time.Duration
	// rest is how long nothing is done afterwards.
	rest time.Duration
}

// plan chooses what is done. It depends on the seed and the faults alone.
type plan struct {
	rand   *rand.Rand
	faults []*fault
	deck   []*fault
	number int
	mode   outbox.Mode
}

func newPlan(seed uint64, faults []*fault) *plan {
	return &plan{rand: newRandom(seed, 0), faults: faults, mode: outbox.ModeAuto}
}

// draw takes the next fault: each comes once before one comes again.
func (p *plan) draw() *fault {
	if len(p.deck) == 0 {
		p.deck = slices.Clone(p.faults)
		p.rand.Shuffle(len(p.deck), func(i, j int) { p.deck[i], p.deck[j] = p.deck[j], p.deck[i] })
	}
	f := p.deck[0]
	p.deck = p.deck[1:]
	return f
}

// next returns the next round.
func (p *plan) next() round {
	p.number++
	r := round{number: p.number, gap: p.between(0, 2*time.Second), rest: p.between(0, 2*time.Second)}
	if p.rand.IntN(4) == 0 {
		if p.mode = outbox.ModePoll; p.rand.IntN(2) == 0 {
			p.mode = outbox.ModeAuto
		}
	}
	r.mode = p.mode
	r.shots = append(r.shots, p.shot(p.draw()))
	if p.rand.IntN(3) > 0 {
		return r
	}
	if second := p.faults[p.rand.IntN(len(p.faults))]; second.touches != r.shots[0].fault.touches {
		r.shots = append(r.shots, p.shot(second))
	}
	return r
}

func (p *plan) shot(f *fault) shot {
	return shot{fault: f, seed: p.rand.Uint64(), hold: p.between(f.least, f.most)}
}

// between chooses a time.
func (p *plan) between(least, most time.Duration) time.Duration {
	if most <= least {
		return least
	}
	return (least + time.Duration(p.rand.Int64N(int64(most-least)))).Round(time.Millisecond)
}

// names of the faults of a round, such as "redis-kill + relay-stop".
func (r round) names() string {
	list := make([]string, len(r.shots))
	for i, s := range r.shots {
		list[i] = s.fault.name
	}
	return strings.Join(list, " + ")
}

// forgets tells whether a fault of the round may have Redis forget something.
func (r round) forgets() bool {
	return slices.ContainsFunc(r.shots, func(s shot) bool { return s.fault.forgets })
}
