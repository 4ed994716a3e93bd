package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// aclRules returns the rules of the users in docs/operations.md, without the shell's quotes.
func aclRules(t *testing.T) map[string][]any {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(testenv.Root(t), "docs", "operations.md"))
	must(t, err)
	users := map[string][]any{}
	for _, line := range regexp.MustCompile(`(?m) ACL SETUSER (.*)$`).FindAllStringSubmatch(string(page), -1) {
		fields := regexp.MustCompile(`'[^']*'|\S+`).FindAllString(line[1], -1)
		var rules []any
		for _, r := range fields[1:] {
			rules = append(rules, strings.Trim(r, "'"))
		}
		users[fields[0]] = rules
	}
	return users
}

// aclRefused has harmful commands for each user of docs/operations.md that the user must not be able to run.
var aclRefused = map[string][]string{
	"posthaste_api": {
		"xadd outbox.order * id 1", "del outbox.order", "hset {outbox.order}:gate n 1", "function load x",
		"function delete x", "flushall", "config set dir /", "publish order.created x", "xgroup destroy outbox.order g",
		"config get requirepass", "set other 1",
	},
	"posthaste_relay": {"set i:key 1", "get i:key", "publish other x", "flushall", "config set dir /", "set other 1"},
	"posthaste_consumer": {
		"xadd outbox.order * id 1", "xdel outbox.order 1-0", "xtrim outbox.order maxlen 0", "del outbox.order",
		"xgroup destroy outbox.order g", "get {outbox.order}:gate",
		"hset {outbox.order}:gate n 1", "get i:key", "get {cr:1}:s", "fcall x 1 {cr:1}:s", "function load x",
		"subscribe order.created", "flushall", "config set dir /", "config get requirepass", "keys *", "scan 0",
	},
	"posthaste_operator": {
		"publish order.created x", "function load x", "flushall", "config set dir /", "config get requirepass",
		"get i:key",
	},
}

// aclNeeded has commands that the test below does not run.
var aclNeeded = map[string][]string{
	"posthaste_relay":    {"xdel dead.outbox.order 1-0", "config get proto-max-bulk-len"},
	"posthaste_operator": {"xdel dead.outbox.order 1-0", "xadd outbox.order * id 1"},
}

// With the Redis rights in docs/operations.md, every process works and reports no fault: orders, their replays, events
// in a group, credits and their events, history published again, groups, trimming. No user has a right that only other
// users need.
func TestRedisUsersWithTheRightsOfThePage(t *testing.T) {
	t.Parallel()
	t.Run("one server", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.usersWithTheRightsOfThePage(w.redis.Client)
	})
	t.Run("a cluster", func(t *testing.T) {
		t.Parallel()
		c := testenv.Cluster(t, 3, 0)
		worldAt(t, c.URL(), c.Client).usersWithTheRightsOfThePage(c.On(t, 0), c.On(t, 1), c.On(t, 2))
	})
}

// usersWithTheRightsOfThePage runs the test. nodes are all servers of the world's Redis.
func (w *world) usersWithTheRightsOfThePage(nodes ...*redis.Client) {
	t := w.t
	t.Helper()
	ctx, url0 := t.Context(), w.rdURL
	users := aclRules(t)
	for user, rules := range users {
		for _, n := range nodes {
			if err := n.Do(ctx, append([]any{"ACL", "SETUSER", user}, rules...)...).Err(); err != nil {
				t.Fatalf("%s: %v", user, err)
			}
		}
	}
	may := func(user, command string) bool {
		args := []any{"acl", "dryrun", user}
		for word := range strings.FieldsSeq(command) {
			args = append(args, word)
		}
		answer, err := nodes[0].Do(ctx, args...).Text()
		if err != nil {
			t.Fatalf("%s, %s: %v", user, command, err)
		}
		return answer == "OK"
	}
	for user, commands := range aclRefused {
		for _, command := range commands {
			if may(user, command) {
				t.Errorf("%s may %s", user, command)
			}
		}
		// After a read that was given up, the process ends the read's connection with these commands.
		for _, command := range append(aclNeeded[user], "client info", "client kill id 1 addr 127.0.0.1:1") {
			if !may(user, command) {
				t.Errorf("%s may not %s", user, command)
			}
		}
	}
	as := func(user string) {
		u, err := url.Parse(url0)
		must(t, err)
		u.User = url.UserPassword(user, "change-me")
		w.rdURL = u.String()
	}
	as("posthaste_relay")
	relay := w.spawn("relay", "--stream-maxlen=5")
	as("posthaste_api")
	api := w.spawn("serve")
	relay.waitReady("")
	user := uuid.NewString()
	// The functions are missing, as on a new primary. serve may not load them; the relay does.
	for _, n := range nodes {
		must(t, n.FunctionFlush(ctx).Err())
	}
	post := func(path, key, body string, want int) { t.Helper(); w.post(api, path, key, body, want) }
	order := fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`, user)
	key := uuid.NewString()
	for range 2 { // Redis answers the second one
		post("/orders", key, order, http.StatusCreated)
	}
	post("/add/"+user, uuid.NewString(), `{"amount":10}`, http.StatusOK)
	post("/deduct/"+user, uuid.NewString(), `{"amount":3}`, http.StatusOK)
	for _, stream := range []string{"outbox.order", "outbox.credits"} { // a consumer does not begin without its streams
		w.waitLen(stream, 1)
	}
	as("posthaste_consumer")
	consumer := w.spawn("consume", "--group=g", "--stream=outbox.order", "--stream=outbox.credits")
	ordered := w.spawn("consume", "--group=o", "--ordered", "--stream=outbox.order")
	ordered.waitLogged("order.created")
	for _, want := range []string{"order.created", "credits.added", "credits.deducted"} {
		consumer.waitLogged(want)
	}
	w.oracle.WaitEmpty(t, 20*time.Second) // the history has only settled events
	as("posthaste_operator")
	for _, command := range [][]string{
		{"replay", "--all", "--to=outbox.side"},
		{"replay", "--all"},
		{"groups", "list"},
		{"doctor"},
		{"status"},
		{"dead", "list"},
		{"credits", "reconcile"},
	} {
		if r := w.once(command...); r.code != 0 || strings.Contains(r.out+r.errOut, "NOPERM") {
			t.Errorf("posthaste %s: exit %d: %s%s", strings.Join(command, " "), r.code, r.out, r.errOut)
		}
	}
	// A group that has lost entries reports it once.
	for range 3 {
		post("/orders", uuid.NewString(), order, http.StatusCreated)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	do(t, w.oracle.Redis, "xgroup", "create", "outbox.order", "late", "0", "entriesread", "0")
	do(t, w.oracle.Redis, "xtrim", "outbox.order", "maxlen", "1")
	as("posthaste_consumer")
	late := w.spawn("consume", "--group=late", "--stream=outbox.order")
	late.waitLogged("events lost")
	as("posthaste_operator")
	// These pages show data from Redis.
	relay.answers()
	api.answers()
	for _, c := range []*child{relay, api, consumer, ordered, late} {
		// serve may not load the functions of the credits. The relay loads them.
		const load = "NOPERM this user has no permissions to run the 'function|load' command"
		if strings.Contains(strings.ReplaceAll(c.output(), load, ""), "NOPERM") {
			t.Errorf("a right is missing:\n%s", c.output())
		}
	}
	for _, c := range []*child{relay, api} {
		c.waitHealthy()
	}
	w.once("groups", "drop", "--stream=outbox.order", "--group=g", "--yes", "--force").says(t, 0)
	for _, n := range nodes {
		refused, err := n.ACLLog(ctx, 100).Result()
		must(t, err)
		for _, r := range refused {
			// doctor cannot read how often Redis syncs.
			who := r.Username + " " + r.Object
			if who != "posthaste_api function|load" && who != "posthaste_operator config|get" {
				t.Errorf("%s is refused %s", r.Username, r.Object)
			}
		}
	}
}
