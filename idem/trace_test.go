package idem

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// play is a random order of what three attempts at one operation do on a real server, one step at a time: a script is
// atomic, so concurrent attempts can do nothing else. It keeps the states of the model that fit what has happened.
type play struct {
	t      *testing.T
	guard  *Guard
	redis  *testenv.RedisServer
	req    Request
	random *rand.Rand

	now    int64 // of the server, in microseconds
	row    int   // of a table with a unique key, counted from 1; 0: none
	at     [attempts]uint8
	tries  [attempts]int
	ticket [attempts]*Ticket

	states map[state]bool
	log    []string
}

// steps are those of the model's attempt i.
func steps(s state, i int, which func(t *state, a *attempt) bool) (list []state) {
	mutation{}.step(s, i, func(f func(t *state, a *attempt)) {
		t := s
		if f(&t, &t.a[i]); t.outages == s.outages && which(&t, &t.a[i]) {
			list = append(list, t)
		}
	})
	return list
}

// allow replaces the states by those that they lead to.
func (p *play) allow(lead func(s state) []state) {
	to := map[state]bool{}
	for s := range p.states {
		for _, t := range lead(s) {
			to[t] = true
		}
	}
	p.states = to
}

// step lets attempt i take a step of the model.
func (p *play) step(i int, which func(t *state, a *attempt) bool) {
	p.allow(func(s state) []state { return steps(s, i, which) })
}

// name is the id of an attempt's last try.
func (p *play) name(i int) string { return fmt.Sprintf("%d.%d", i, p.tries[i]) }

func (p *play) begin(i int) {
	p.tries[i]++
	v := p.guard.acquire(p.t.Context(), &p.req, p.name(i))
	p.log = append(p.log, fmt.Sprintf("attempt %d begins: %s", i, v.outcome))
	switch v.outcome {
	case OutcomeAcquired, OutcomeTakeover:
		p.at[i], p.ticket[i] = atWork, v.Ticket
		p.allow(func(s state) []state {
			if (v.outcome == OutcomeAcquired) != (s.kind == 0) {
				return nil
			}
			return steps(s, i, func(_ *state, a *attempt) bool { return a.at == atWork })
		})
	case OutcomeReplayRedis:
		p.at[i] = atEnd
		p.step(i, func(t *state, a *attempt) bool { return t.kind == 'C' && fmt.Sprint(a.got) == v.Record.Ref })
	default: // it tries again
		p.allow(func(s state) []state {
			if v.outcome != OutcomeBusy || s.kind != 'P' || s.expired {
				return nil
			}
			return []state{s}
		})
	}
}

// resend is the acquisition of an owner that got no reply.
func (p *play) resend(i int) {
	v := p.guard.acquire(p.t.Context(), &p.req, p.name(i))
	p.log = append(p.log, fmt.Sprintf("attempt %d begins once more: %s", i, v.outcome))
	if v.outcome != OutcomeAcquired || v.Ticket.Token() != p.ticket[i].Token() {
		p.states = nil
	}
}

// work inserts the row or finds it. The COMMIT of a silent attempt is not answered, so it inserts again.
func (p *play) work(i int, fails, silent bool) {
	p.log = append(p.log, fmt.Sprintf("attempt %d works: row %d, fails %v, silent %v", i, p.row, fails, silent))
	if p.row == 0 && fails {
		p.at[i] = atRelease
		p.step(i, func(_ *state, a *attempt) bool { return a.at == atRelease })
		return
	}
	if p.row == 0 {
		p.row = i + 1
		p.step(i, func(_ *state, a *attempt) bool { return a.at == atCommit })
		if !silent {
			p.at[i] = atReply
			p.step(i, func(t *state, a *attempt) bool { return t.rows[i] && a.at == atReply })
			return
		}
		p.step(i, func(t *state, a *attempt) bool { return t.rows[i] && a.at == atResolve })
	}
	p.at[i] = atReply
	p.step(i, func(_ *state, a *attempt) bool { return a.at == atReply && int(a.got) == p.row })
}

// end publishes or releases.
func (p *play) end(i int) {
	p.log = append(p.log, fmt.Sprintf("attempt %d ends", i))
	any := func(*state, *attempt) bool { return true }
	if p.at[i] == atRelease {
		p.ticket[i].Abort(p.t.Context())
	} else {
		p.ticket[i].Commit(p.t.Context(), Record{Status: 201, Ref: strconv.Itoa(p.row)})
		p.step(i, any) // its reply
	}
	p.at[i] = atEnd
	p.step(i, any)
}

// pass lets the leases end.
func (p *play) pass() {
	p.log = append(p.log, "the lease ends")
	p.now += p.guard.lease.Microseconds() + 1000
	p.allow(func(s state) []state {
		if s.kind == 'P' {
			s.expire()
		}
		return []state{s}
	})
}

func (p *play) lose() {
	p.log = append(p.log, "Redis loses the record")
	must(p.t, p.redis.Client.Del(p.t.Context(), p.req.Key.String()).Err())
	p.allow(func(s state) (list []state) {
		if s.kind == 0 {
			return []state{s}
		}
		for _, t := range (mutation{}).next(s) {
			if t.losses > s.losses {
				list = append(list, t)
			}
		}
		return list
	})
}

// run plays until all attempts have ended, and returns what happened if the model does not allow that.
func (p *play) run() (refused []string) {
	for losses := 0; len(p.log) < 60 && p.at != [attempts]uint8{atEnd, atEnd, atEnd}; {
		p.now++
		setClock(p.t, p.redis, p.now)
		i := p.random.IntN(attempts)
		before := rawRecord(p.t, p.redis.Client, p.req.Key)
		owner := strings.HasPrefix(before, "P|") && strings.Split(before, "|")[3] == p.name(i)
		switch random := p.random.IntN(24); {
		case random < 3:
			p.pass()
		case random < 4 && losses < 2:
			losses++
			p.lose()
		case p.at[i] == atEnd:
		case random < 5: // its process is killed
			p.at[i] = atEnd
			p.allow(func(s state) []state { s.a[i].end(); return []state{s} })
		case p.at[i] == atStart:
			p.begin(i)
		case p.at[i] == atWork && owner && random < 8:
			p.resend(i)
		case p.at[i] == atWork:
			p.work(i, random < 12, random%3 == 0)
		default:
			p.end(i)
		}
		p.compare(before)
		if len(p.states) == 0 {
			return p.log
		}
	}
	return nil
}

// compare drops the states with another record than the server. A finished record does not change.
func (p *play) compare(before string) {
	record := rawRecord(p.t, p.redis.Client, p.req.Key)
	head, _, _ := strings.Cut(record, "\n")
	f := strings.Split(head, "|")
	p.allow(func(s state) []state {
		same := s.kind == 0
		switch f[0] {
		case "P":
			i, _ := strconv.Atoi(f[3][:1])
			same = s.kind == 'P' && s.a[i].token == s.owner
		case "C":
			same = s.kind == 'C' && fmt.Sprint(s.ref) == f[4] && (record == before || !strings.HasPrefix(before, "C|"))
		}
		if !same {
			return nil
		}
		return []state{s}
	})
}

// plays runs plays with guards whose scripts are edited, until the model refuses one.
func plays(t *testing.T, r *testenv.RedisServer, n int, edit ...string) (refused []string) {
	t.Helper()
	g := guardOn(t, r.URL())
	onTestClock(t, g, edit...)
	g.cache = newCache(1, -time.Second) // answers nothing
	for seed := range uint64(n) {
		r.Client.FlushAll(t.Context())
		p := &play{
			t: t, guard: g, redis: r, req: request("k", "a"), random: rand.New(rand.NewPCG(seed, 1)),
			now: 1_795_000_000_000_000, states: map[state]bool{{}: true},
		}
		if refused = p.run(); refused != nil {
			break
		}
	}
	return refused
}

// Guards on a real server take no step that the model refuses, whatever ends their leases, loses their record, fails or
// leaves them unanswered.
func TestGuardsDoWhatTheModelSays(t *testing.T) {
	t.Parallel()
	n := 200
	if os.Getenv("POSTHASTE_TEST_FULL") != "" {
		n = 5000
	}
	if refused := plays(t, testenv.Redis(t, "appendonly no"), n); refused != nil {
		t.Errorf("the model does not allow this:\n%s", strings.Join(refused, "\n"))
	}
}

// A guard without one of its safeguards takes a step that the model refuses.
func TestTheModelRefusesAWeakGuard(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	for name, edit := range map[string][]string{
		"a lease that is not looked at":          {"if tonumber(b)>ms then", "if false then"},
		"a release without the fence":            {"st=='P' and tk==ARGV[1]", "true"},
		"a publication that overwrites another":  {"if st=='C' then return fp", "if false then return fp"},
		"a resend that meets itself":             {"if a==ARGV[2]", "if false"},
		"a record that ends before its attempts": {"'PX',ARGV[4])", "'PX',1)"},
	} {
		if plays(t, r, 1000, edit...) == nil {
			t.Errorf("%s: the model allows it", name)
		}
	}
}
