package idem

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// deed is what an attempt did between two moments; it took effect in between. apply returns where it can lead.
type deed struct {
	says       string
	begin, end time.Time
	apply      func(s state) []state
}

// answers keeps the last reply that a client got.
type answers struct{ last string }

func (a *answers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (a *answers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		a.note(cmd)
		return err
	}
}

func (a *answers) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			a.note(cmd)
		}
		return err
	}
}

func (a *answers) note(cmd redis.Cmder) {
	if c, ok := cmd.(*redis.Cmd); ok && c.Err() == nil {
		a.last = strings.Trim(fmt.Sprint(c.Val()), "[]")
	}
}

// play has three attempts at one operation, each with its own guard, and a table with a unique key in memory.
type play struct {
	t      *testing.T
	key    string
	lease  time.Duration
	redis  *testenv.RedisServer
	guards [attempts]*Guard
	reply  [attempts]*answers
	ticket [attempts]*Ticket

	mu    sync.Mutex
	row   int // counted from 1; 0: none
	deeds []deed
}

func newPlay(t *testing.T, r *testenv.RedisServer, key string, lease time.Duration, weak func(g *Guard)) *play {
	t.Helper()
	p := &play{t: t, key: key, lease: lease, redis: r}
	for i := range p.guards {
		p.guards[i], p.reply[i] = guardOn(t, r.URL(), func(o *Options) { o.Lease = lease }), &answers{}
		p.guards[i].client.AddHook(p.reply[i])
		if weak != nil {
			weak(p.guards[i])
		}
	}
	return p
}

// did notes a deed that began at a moment and ends now.
func (p *play) did(began time.Time, says string, apply func(s state) []state) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deeds = append(p.deeds, deed{says, began, time.Now(), apply})
}

// steps are those of the model's attempt i.
func steps(s state, i int, which func(t *state, a *attempt) bool) (list []state) {
	mutation{}.step(s, i, func(f func(t *state, a *attempt)) {
		t := s
		if f(&t, &t.a[i]); which(&t, &t.a[i]) {
			list = append(list, t)
		}
	})
	return list
}

// begin reports whether the attempt may work.
func (p *play) begin(i int) bool {
	began := time.Now()
	d, err := p.guards[i].Begin(p.t.Context(), request(p.key, "a"))
	if err != nil {
		p.t.Error(err)
		return false
	}
	p.ticket[i] = d.Ticket
	code, _, _ := strings.Cut(p.reply[i].last, " ")
	p.did(began, fmt.Sprintf("attempt %d begins: %s", i, code), func(s state) []state {
		switch code {
		case "ACQUIRED", "TAKEOVER":
			if (code == "ACQUIRED") != (s.kind == 0) {
				return nil
			}
			return steps(s, i, func(t *state, a *attempt) bool { return a.at == atWork && t.outages == s.outages })
		case "REPLAY":
			ref, err := strconv.Atoi(d.Record.Ref)
			if err != nil || s.kind != 'C' {
				return nil
			}
			return steps(s, i, func(_ *state, a *attempt) bool { return int(a.got) == ref })
		default: // it tries again
			if s.kind == 'P' && !s.expired {
				return []state{s}
			}
			return nil
		}
	})
	return d.Outcome == Proceed
}

// takesOver begins an attempt when the lease of another one has ended.
func (p *play) takesOver(i int) {
	p.t.Helper()
	testenv.Eventually(p.t, time.Second, func() error {
		if !p.begin(i) {
			return fmt.Errorf("attempt %d: %s", i, p.reply[i].last)
		}
		return nil
	})
}

// work inserts the row or finds it; it fails, or its COMMIT is not answered, and then it is done again.
func (p *play) work(i int, fails, silent bool) bool {
	began := time.Now()
	p.mu.Lock()
	found := p.row
	if found == 0 && !fails {
		p.row = i + 1
	}
	row := p.row
	p.mu.Unlock()
	p.did(began, fmt.Sprintf("attempt %d works: row %d, fails %v, silent %v", i, row, fails, silent),
		func(s state) (list []state) {
			if found == 0 && fails {
				return steps(s, i, func(_ *state, a *attempt) bool { return a.at == atRelease })
			}
			begun := func(_ *state, a *attempt) bool { return a.at == atCommit || a.at == atReply }
			for _, t := range steps(s, i, begun) {
				switch {
				case (t.a[i].at == atReply) != (found != 0):
				case found != 0 && int(t.a[i].got) == found:
					list = append(list, t)
				case found == 0:
					list = append(list, steps(t, i, func(u *state, a *attempt) bool {
						return u.rows[i] && (a.at == atResolve) == silent
					})...)
				}
			}
			return list
		})
	if found == 0 && fails {
		return false
	}
	if found == 0 && silent {
		return p.work(i, false, false)
	}
	return true
}

func (p *play) commit(i int) {
	began := time.Now()
	p.mu.Lock()
	rec := Record{Status: 201, Ref: strconv.Itoa(p.row)}
	p.mu.Unlock()
	p.ticket[i].Commit(p.t.Context(), rec)
	reply := p.reply[i].last
	p.did(began, fmt.Sprintf("attempt %d publishes: %s", i, reply), func(s state) (list []state) {
		for _, t := range steps(s, i, func(_ *state, a *attempt) bool { return a.at == atPublish }) {
			if (reply == "DONE") == (t.kind == 'C') {
				list = append(list, steps(t, i, func(_ *state, _ *attempt) bool { return true })...)
			}
		}
		return list
	})
}

func (p *play) abort(i int) {
	began := time.Now()
	p.ticket[i].Abort(p.t.Context())
	reply := p.reply[i].last
	p.did(began, fmt.Sprintf("attempt %d releases: %s", i, reply), func(s state) []state {
		return steps(s, i, func(t *state, _ *attempt) bool {
			return (reply == "OK") == (s.kind != 0 && t.kind == 0) && (reply == "GONE") == (s.kind == 0)
		})
	})
}

// lose deletes the record.
func (p *play) lose() {
	began := time.Now()
	n, err := p.redis.Client.Del(p.t.Context(), request(p.key, "a").Key.String()).Result()
	if err != nil {
		p.t.Error(err)
	}
	p.did(began, fmt.Sprintf("Redis forgets %d", n), func(s state) []state {
		if n == 0 && s.kind == 0 {
			return []state{s}
		}
		return slices.DeleteFunc(mutation{}.next(s), func(t state) bool { return n == 0 || t.losses == s.losses })
	})
}

// refused looks for an order of what was done that the model allows. It returns the first deed that has none.
func (p *play) refused() string {
	type config struct {
		state
		done uint64
	}
	// began is when each attempt's lease began at the earliest.
	var began [attempts]time.Time
	for _, d := range p.deeds {
		var i int
		if _, err := fmt.Sscanf(d.says, "attempt %d begins", &i); err == nil {
			began[i] = d.begin
		}
	}
	now := map[config]bool{{}: true}
	order := make([]int, len(p.deeds))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return p.deeds[a].end.Compare(p.deeds[b].end) })
	for _, at := range order {
		var todo []config
		for c := range now {
			todo = append(todo, c)
		}
		add := func(c config) {
			if !now[c] {
				now[c] = true
				todo = append(todo, c)
			}
		}
		for len(todo) > 0 {
			c := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			for i, a := range c.a { // a lease ends, but not before its time
				if c.kind == 'P' && !c.expired && a.token == c.owner &&
					p.deeds[at].end.Sub(began[i]) >= p.lease-2*time.Millisecond {
					for _, t := range (mutation{}).next(c.state) {
						if t.expired && t.losses == c.losses && t.crashes == c.crashes {
							add(config{t, c.done})
						}
					}
				}
			}
			for k, d := range p.deeds {
				if c.done>>k&1 == 0 && !d.begin.After(p.deeds[at].end) {
					for _, t := range d.apply(c.state) {
						add(config{t, c.done | 1<<k})
					}
				}
			}
		}
		for c := range now {
			if c.done>>at&1 == 0 {
				delete(now, c)
			}
		}
		if len(now) == 0 {
			return p.deeds[at].says
		}
	}
	return ""
}

func (p *play) log() string {
	var b strings.Builder
	for _, d := range p.deeds {
		fmt.Fprintf(&b, "%s to %s: %s\n", d.begin.Format("05.000000"), d.end.Format("05.000000"), d.says)
	}
	return b.String()
}

// Guards on a real server take no step that the model refuses, whatever ends their leases, loses their record, fails or
// leaves them unanswered.
func TestGuardsDoWhatTheModelSays(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	rounds := 10
	if os.Getenv("POSTHASTE_TEST_FULL") != "" {
		rounds = 300
	}
	for round := range rounds {
		p := newPlay(t, r, fmt.Sprintf("trace %d", round), 20*time.Millisecond, nil)
		var all sync.WaitGroup
		for i := range attempts {
			random := rand.New(rand.NewPCG(uint64(round), uint64(i)))
			rest := func() { time.Sleep(time.Duration(random.IntN(25)) * time.Millisecond) }
			all.Go(func() {
				rest()
				for range 5 {
					if p.begin(i) {
						break
					}
					if p.ticket[i] == nil && strings.HasPrefix(p.reply[i].last, "REPLAY") {
						return
					}
					rest()
				}
				if p.ticket[i] == nil {
					return
				}
				rest()
				switch {
				case random.IntN(6) == 0: // its process is killed
				case p.work(i, random.IntN(4) == 0, random.IntN(3) == 0):
					rest()
					p.commit(i)
				default:
					rest()
					p.abort(i)
				}
			})
		}
		if round%3 == 0 {
			all.Go(func() {
				time.Sleep(30 * time.Millisecond)
				p.lose()
			})
		}
		all.Wait()
		if refused := p.refused(); refused != "" {
			t.Errorf("round %d: the model does not allow this: %s\n%s", round, refused, p.log())
		}
	}
}

// A guard without one of its safeguards takes a step that the model refuses.
func TestTheModelRefusesAWeakGuard(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	for _, c := range []struct {
		script, from, to string
		lease            time.Duration
		play             func(p *play)
	}{
		{scriptAcquire, "if tonumber(b)>ms then", "if false then", time.Minute, func(p *play) {
			p.begin(0)
			p.begin(1)
		}},
		{scriptRelease, "st=='P' and tk==ARGV[1]", "true", 20 * time.Millisecond, func(p *play) {
			p.begin(0)
			p.takesOver(1)
			p.work(0, true, false)
			p.abort(0)
		}},
		{scriptPublish, "if st=='C'", "if false", 20 * time.Millisecond, func(p *play) {
			p.begin(0)
			p.takesOver(1)
			p.work(0, false, false)
			p.work(1, false, false)
			p.commit(0)
			p.commit(1)
		}},
	} {
		for _, weak := range []bool{false, true} {
			text, err := luaFiles.ReadFile("lua/" + c.script + ".lua")
			if err != nil || !strings.Contains(string(text), c.from) {
				t.Fatalf("the script has no %q", c.from)
			}
			p := newPlay(t, r, fmt.Sprintf("weak %s %v", c.script, weak), c.lease, func(g *Guard) {
				if weak {
					g.scripts[c.script] = redis.NewScript(strings.Replace(string(text), c.from, c.to, 1))
				}
			})
			c.play(p)
			if refused := p.refused(); weak != (refused != "") {
				t.Errorf("%s without %q: %v, refused: %q\n%s", c.script, c.from, weak, refused, p.log())
			}
		}
	}
}
