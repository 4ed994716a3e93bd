package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
)

// aclRules are the rules of the command in docs/operations.md, without its shell quotes.
func aclRules(t *testing.T) []any {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(testenv.Root(t), "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, line, found := strings.Cut(string(page), " ACL SETUSER posthaste ")
	line, _, _ = strings.Cut(line, "\n")
	if !found {
		t.Fatal("docs/operations.md names no rules")
	}
	var rules []any
	for _, r := range strings.Fields(line) {
		rules = append(rules, strings.Trim(r, "'"))
	}
	return rules
}

// With the rights that docs/operations.md gives to a user of Redis, every process works and says that nothing is wrong:
// orders, their replays, events in a group, credits and their events, history published again, groups, trimming.
func TestARedisUserWithTheRightsOfThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := w.redis.Client.Do(t.Context(), append([]any{"ACL", "SETUSER", "posthaste"},
		aclRules(t)...)...).Err(); err != nil {
		t.Fatal(err)
	}
	// What is asked only after trouble: the connection of a read that was given up is ended.
	for _, command := range []string{"client info", "client kill id 1 addr 127.0.0.1:1"} {
		args := []any{"acl", "dryrun", "posthaste"}
		for word := range strings.FieldsSeq(command) {
			args = append(args, word)
		}
		if answer, err := w.redis.Client.Do(t.Context(), args...).Text(); err != nil || answer != "OK" {
			t.Errorf("%s: %s, %v", command, answer, err)
		}
	}
	u, err := url.Parse(w.rdURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("posthaste", "change-me")
	w.rdURL = u.String()

	relay, api := w.spawn("relay", "--stream-maxlen=5"), w.spawn("serve")
	consumer := w.spawn("consume", "--group=g")
	relay.waitReady(t, http.StatusOK, "")
	user := uuid.NewString()
	// Again under the same key: half a second without an answer from Redis is no missing right. That shows each time.
	post := func(path, key, body string, want int) {
		t.Helper()
		testenv.Eventually(t, 20*time.Second, func() error {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, api.http+path, strings.NewReader(body))
			if err != nil {
				return err
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Idempotency-Key", key)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			res.Body.Close()
			if res.StatusCode != want || res.Header.Get("Idempotency-Guard") == "db" {
				return fmt.Errorf("POST %s: %d, headers %v\n%s", path, res.StatusCode, res.Header, api.output())
			}
			return nil
		})
	}
	order := fmt.Sprintf(`{"user_id":%q,"amount":5,"currency":"USD"}`, user)
	key := uuid.NewString()
	for range 2 { // the second is answered from Redis
		post("/orders", key, order, http.StatusCreated)
	}
	post("/add/"+user, uuid.NewString(), `{"amount":10}`, http.StatusOK)
	post("/deduct/"+user, uuid.NewString(), `{"amount":3}`, http.StatusOK)
	testenv.Eventually(t, 20*time.Second, func() error {
		for _, want := range []string{"order.created", "credits.added", "credits.deducted"} {
			if !consumer.logged(want) {
				return fmt.Errorf("no %s in the group: %s", want, consumer.output())
			}
		}
		return nil
	})
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
	for _, c := range []*child{relay, api, consumer} {
		if strings.Contains(c.output(), "NOPERM") {
			t.Errorf("a right is missing:\n%s", c.output())
		}
	}
	for _, c := range []*child{relay, api} {
		testenv.Eventually(t, 20*time.Second, func() error {
			var h readiness
			if status, err := c.get("/readyz", &h); err != nil || status != http.StatusOK || len(h.Degraded) > 0 {
				return fmt.Errorf("readyz: %d %+v, %w", status, h, err)
			}
			return nil
		})
	}
	if r := w.once("groups", "drop", "--stream=outbox.order", "--group=g", "--yes", "--force"); r.code != 0 {
		t.Errorf("groups drop: exit %d: %s%s", r.code, r.out, r.errOut)
	}
}
