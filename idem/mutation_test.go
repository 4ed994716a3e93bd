package idem

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/testenv"
)

// Each part of the scripts that a weaker guard leaves out, left out on purpose: the scenario that it is there for goes
// wrong then, and only then.
func TestWeakenedScripts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, script, from, to string
		// broken runs the scenario and reports whether the promise was broken.
		broken func(t *testing.T, g, other *Guard, r *testenv.RedisServer) bool
	}{
		{
			"an unconditional DEL frees another owner's key", scriptRelease, "st=='P' and tk==ARGV[1]", "true",
			zombieAborts,
		},
		{
			"a heartbeat without the fence steals the lease", scriptHeartbeat, "st~='P' or tk~=ARGV[1]", "false",
			zombieBeats,
		},
		{"without attempt ids a resend meets itself", scriptAcquire, "if a==ARGV[2]", "if false", resends},
		{
			"without the fingerprint another command gets the receipt", scriptAcquire, "if fp~=ARGV[1]", "if false",
			anotherCommand,
		},
		{"a publication that overwrites changes the receipt", scriptPublish, "if st=='C'", "if false", publishesTwice},
		{
			"tokens from the clock alone go back with it", scriptAcquire, "tok=math.max(us,tonumber(tk)+1)", "tok=us",
			clockSteppedBack,
		},
		{
			"a pending record without a fence belongs to anybody", scriptAcquire, "redis.call('SET',KEYS[1]",
			"tok=1 redis.call('SET',KEYS[1]", zombieAborts,
		},
		{
			"a record that expires before its owner ends is taken over", scriptAcquire, "'PX',ARGV[4])", "'PX',20)",
			expiresAtWork,
		},
		{
			"a lease that is not looked at is taken over", scriptAcquire, "if tonumber(b)>ms then", "if false then",
			takesOverEarly,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, weak := range []bool{false, true} {
				r := testenv.Redis(t, "appendonly no")
				lease := func(o *Options) { o.Lease = 100 * time.Millisecond }
				g, other := guardOn(t, r.URL(), lease), guardOn(t, r.URL(), lease)
				if weak {
					text, err := luaFiles.ReadFile("lua/" + c.script + ".lua")
					if err != nil || !strings.Contains(string(text), c.from) {
						t.Fatalf("the script has no %q", c.from)
					}
					s := redis.NewScript(strings.Replace(string(text), c.from, c.to, 1))
					g.scripts[c.script], other.scripts[c.script] = s, s
				}
				if got := c.broken(t, g, other, r); got != weak {
					t.Errorf("weakened: %v, broken: %v", weak, got)
				}
			}
		})
	}
}

// takeover returns the tickets of an attempt whose lease ended, and of the one that came after it.
func takeover(t *testing.T, g, other *Guard) (old, current *Ticket) {
	t.Helper()
	old = begin(t, g, request("k", "a")).Ticket
	req := request("k", "a")
	req.Wait = 10 * time.Second
	d := begin(t, other, req)
	wantOutcome(t, d, Proceed)
	return old, d.Ticket
}

func zombieAborts(t *testing.T, g, other *Guard, r *testenv.RedisServer) bool {
	old, current := takeover(t, g, other)
	old.Abort(t.Context())
	return rawRecord(t, r.Client, current.key) == ""
}

func zombieBeats(t *testing.T, g, other *Guard, _ *testenv.RedisServer) bool {
	old, _ := takeover(t, g, other)
	return old.Heartbeat(t.Context()) == nil
}

func resends(t *testing.T, g, _ *Guard, _ *testenv.RedisServer) bool {
	g.lease = time.Minute
	req := request("k", "a")
	g.acquire(t.Context(), &req, "same")
	return g.acquire(t.Context(), &req, "same").Outcome == Busy
}

func anotherCommand(t *testing.T, g, other *Guard, _ *testenv.RedisServer) bool {
	begin(t, g, request("k", "a")).Ticket.Commit(t.Context(), result)
	return begin(t, other, request("k", "b")).Outcome == Replay
}

func publishesTwice(t *testing.T, g, other *Guard, _ *testenv.RedisServer) bool {
	ticket := begin(t, g, request("k", "a")).Ticket
	ticket.Commit(t.Context(), result)
	ticket.Commit(t.Context(), Record{Status: 201, Ref: "another"})
	return begin(t, other, request("k", "a")).Record != result
}

// clockSteppedBack puts a record of the future in place, as an owner leaves it whose server's clock was ahead.
func clockSteppedBack(t *testing.T, g, _ *Guard, r *testenv.RedisServer) bool {
	const future = "9007199254740000"
	req := request("k", "a")
	r.Client.Set(t.Context(), req.Key.String(), "P|"+req.Fingerprint.text()+"|"+future+"|x|1", 0)
	d := begin(t, g, req)
	wantOutcome(t, d, Proceed)
	return d.Ticket.Token() <= 9007199254740000
}

func takesOverEarly(t *testing.T, g, other *Guard, _ *testenv.RedisServer) bool {
	g.lease = time.Minute
	begin(t, g, request("k", "a"))
	return begin(t, other, request("k", "a")).Outcome == Proceed
}

// expiresAtWork has a lease far longer than the test, whose owner is at work all the time.
func expiresAtWork(t *testing.T, g, other *Guard, _ *testenv.RedisServer) bool {
	g.lease, other.lease = time.Minute, time.Minute
	begin(t, g, request("k", "a"))
	req := request("k", "a")
	req.Wait = 300 * time.Millisecond
	return begin(t, other, req).Outcome == Proceed
}
