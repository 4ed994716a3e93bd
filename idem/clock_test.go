package idem

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

const (
	minute = 60_000_000 // microseconds
	clock  = "clock"
)

// onTestClock makes a guard's scripts read their time from a key of the test instead of the server. Cluster would
// refuse that key, one server does not. edit changes the texts.
func onTestClock(t *testing.T, g *Guard, edit ...string) {
	t.Helper()
	edited := len(edit) == 0
	for _, name := range scriptNames {
		b, err := luaFiles.ReadFile("lua/" + name + ".lua")
		must(t, err)
		text := strings.NewReplacer(edit...).Replace(string(b))
		edited = edited || text != string(b)
		text = strings.ReplaceAll(text, "redis.call('TIME')", "redis.call('LRANGE','"+clock+"',0,-1)")
		g.scripts[name] = redis.NewScript(text)
	}
	if !edited {
		t.Fatalf("no script has any of %q", edit)
	}
}

// setClock sets the test's clock, in microseconds.
func setClock(t *testing.T, r *testenv.RedisServer, us int64) {
	t.Helper()
	_, err := r.Client.TxPipelined(t.Context(), func(p redis.Pipeliner) error {
		p.Del(t.Context(), clock)
		p.RPush(t.Context(), clock, us/1e6, us%1e6)
		return nil
	})
	must(t, err)
}

// walk does random things to one key while the server's clock jumps, and returns what was wrong. Tokens grow while the
// record stands, whatever the clock does; after the record is gone they are lower only if the clock was set back.
func walk(t *testing.T, r *testenv.RedisServer, g *Guard, seed uint64) (wrong []string) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 1))
	req := request(fmt.Sprint("k", seed), "a")
	us := int64(1_795_000_000_000_000)
	var tickets []*Ticket
	last := int64(0)
	steppedBack, forgotten := false, true
	for range 60 {
		us += 1 + rnd.Int64N(2*minute/60)
		switch rnd.IntN(8) {
		case 0:
			us += 10 * minute
		case 1:
			us -= 10 * minute
			steppedBack = true
		case 2:
			r.Client.FlushAll(t.Context())
			forgotten = true
		}
		setClock(t, r, us)
		switch rnd.IntN(4) {
		case 0, 1:
			d := begin(t, g, req)
			if d.Outcome != Proceed {
				continue
			}
			wantGuarded(t, d, true)
			if token := d.Ticket.Token(); token <= last && (!forgotten || !steppedBack) {
				wrong = append(wrong, fmt.Sprintf("token %d after %d, forgotten %v, stepped back %v", token, last,
					forgotten,
					steppedBack))
			}
			// A takeover's token stays ahead of a clock that was set back before.
			last, forgotten = d.Ticket.Token(), false
			steppedBack = last > us
			tickets = append(tickets, d.Ticket)
		case 2:
			if len(tickets) == 0 {
				continue
			}
			owner := tickets[rnd.IntN(len(tickets))]
			err := owner.Heartbeat(t.Context())
			if current := rawRecord(t, r.Client, req.Key); current != "" &&
				errors.Is(err, ErrLost) == isOwner(current, owner) {
				wrong = append(wrong, fmt.Sprintf("heartbeat with %d on %q: %v", owner.Token(), current, err))
			}
		case 3:
			if len(tickets) == 0 {
				continue
			}
			owner, before := tickets[rnd.IntN(len(tickets))], rawRecord(t, r.Client, req.Key)
			owner.Abort(t.Context())
			gone := rawRecord(t, r.Client, req.Key) == ""
			if before != "" && gone != isOwner(before, owner) {
				wrong = append(wrong, fmt.Sprintf("release with %d on %q", owner.Token(), before))
			}
			forgotten = forgotten || gone
		}
	}
	return wrong
}

func isOwner(record string, t *Ticket) bool {
	return strings.Contains(record, fmt.Sprintf("|%d|", t.Token()))
}

func TestTheServersClockMayJump(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		edit   []string
		broken bool
	}{
		{"as designed", nil, false},
		{"tokens from the clock alone", []string{"tok=math.max(us,tonumber(tk)+1)", "tok=us"}, true},
		{"tokens that start from one", []string{
			"local tok,code=us,", "local tok,code=1,", "math.max(us,tonumber(tk)+1)", "tonumber(tk)+1",
		}, true},
		{"a heartbeat of anybody", []string{"st~='P' or tk~=ARGV[1]", "false"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t, "appendonly no")
			g := guardOn(t, r.URL())
			onTestClock(t, g, c.edit...)
			var wrong []string
			for seed := range uint64(20) {
				wrong = append(wrong, walk(t, r, g, seed)...)
			}
			if (len(wrong) > 0) != c.broken {
				t.Errorf("%d times wrong, want some: %v; %q", len(wrong), c.broken, wrong)
			}
		})
	}
}

// A lease is a matter of the server's clock: ahead by ten minutes it has ended, behind by ten it runs on.
func TestALeaseFollowsTheServersClock(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	onTestClock(t, g)
	now := int64(1_795_000_000_000_000)
	setClock(t, r, now)
	first := begin(t, g, request("k", "a")).Ticket
	setClock(t, r, now-10*minute)
	wantOutcome(t, begin(t, g, request("k", "a")), Busy)
	setClock(t, r, now+10*minute)
	d := begin(t, g, request("k", "a"))
	wantOutcome(t, d, Proceed)
	setClock(t, r, now-10*minute)
	if d.Ticket.Token() <= first.Token() || first.Heartbeat(t.Context()) == nil ||
		d.Ticket.Heartbeat(t.Context()) != nil {
		t.Errorf("token %d after %d, or the wrong owner", d.Ticket.Token(), first.Token())
	}
}

// The process below lives in the year 2000: nothing the guard promises comes from the application's clock.
func TestTheApplicationsClockIsIrrelevant(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "appendonly no")
	g := guardOn(t, r.URL())
	first := begin(t, g, request("k", "a")).Ticket
	inThePast := func(f func(t *testing.T, g *Guard)) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			if time.Since(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)) > 0 {
				t.Fatal("the clock is right")
			}
			f(t, guardOn(t, r.URL()))
		})
	}
	inThePast(func(t *testing.T, g *Guard) {
		busy := begin(t, g, request("k", "a"))
		if busy.Outcome != Busy || busy.RetryAfter <= 0 || busy.RetryAfter > time.Second {
			t.Errorf("a running lease: %+v", busy)
		}
	})
	first.Abort(t.Context())
	var second *Ticket
	inThePast(func(t *testing.T, g *Guard) {
		d := begin(t, g, request("k", "a"))
		wantOutcome(t, d, Proceed)
		if second = d.Ticket; second.Token() <= first.Token() {
			t.Errorf("token %d after %d", second.Token(), first.Token())
		}
	})
	wantOutcome(t, begin(t, g, request("k", "a")), Busy)
	inThePast(func(t *testing.T, g *Guard) {
		own := *second
		own.guard = g
		testenv.ErrorIs(t, "heartbeat", own.Heartbeat(t.Context()), nil)
		own.Commit(t.Context(), result)
	})
	replays(t, g, request("k", "a"), result)
	if ttl := r.Client.PTTL(t.Context(), second.key.String()).Val(); ttl > TTL || ttl < TTL-time.Minute {
		t.Errorf("the record stays %v", ttl)
	}
}
