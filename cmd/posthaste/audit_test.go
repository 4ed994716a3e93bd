package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/internal/audit"
)

// silent are the commands that change nothing that needs an audit entry.
var silent = []string{
	"migrate", "serve", "relay", "consume", "deliver", "status", "dead list", "dead show", "audit", "groups list",
	"trace", "streams list", "bridge list",
	"doctor", "credits reconcile", "credits balance", "keygen", "healthcheck", "settings", "version", "help",
	"completion", "bench drain", "bench latency", "bench orders", "dev", "demo", "prove", "shadow", "prove-consumer",
	"gen-docs",
}

// Every command that changes something writes one attempt with its outcome to the table, and one line to the log.
func TestEveryCommandThatChangesLeavesAnEntry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	frozen := uuid.New()
	changing := map[string]func() []string{
		"mode":       func() []string { return []string{"poll"} },
		"dead retry": func() []string { return []string{w.park()} },
		"dead drop":  func() []string { _ = w.park(); return []string{"--all", "--yes"} },
		"replay": func() []string {
			w.keep(3, "outbox.order")
			return []string{"--all"}
		},
		// In the order of their names, the one makes what the other drops.
		"bridge create": func() []string { return append(w.debezium(), "--yes") },
		"bridge drop":   func() []string { return []string{"--table=public.outboxevent", "--yes"} },

		"phantoms": func() []string { return []string{"--ack"} },
		"adopt":    func() []string { return []string{"--yes"} },
		"groups drop": func() []string {
			must(t, w.redis.Client.XGroupCreateMkStream(t.Context(), "outbox.order", "gone", "0").Err())
			return []string{"--stream=outbox.order", "--group=gone", "--yes"}
		},
		"streams leave": func() []string {
			do(t, w.redis.Client, "hset", registerOf("outbox.order"), "id", "1", "s:/posthaste/gone", "2")
			do(t, w.redis.Client, "hdel", registerOf("outbox.order"), "alone")
			return []string{"--source=/posthaste/gone", "--yes"}
		},
		"streams spread": func() []string { return []string{"--per-type=2"} },
		"streams drop":   func() []string { return []string{"--stream=outbox.order", "--yes"} },
		"credits unfreeze": func() []string {
			w.db.Exec(t, "INSERT INTO credit_accounts (user_id, balance, last_seq, frozen, updated_at) "+
				"VALUES ($1, 0, 0, 'gap', now())", frozen)
			w.db.Exec(t, "INSERT INTO credit_epoch (bucket) VALUES ($1)", credits.Bucket(frozen))
			return []string{frozen.String(), "--settle=ledger", "--yes"}
		},
		"uninstall": func() []string { return []string{"--yes"} },
	}
	var line commandLine
	parser, err := newParser(&line)
	must(t, err)
	for _, leaf := range parser.Model.Leaves(false) {
		name := strings.TrimPrefix(leaf.Path(), "posthaste ")
		if _, changes := changing[name]; changes == slices.Contains(silent, name) {
			t.Errorf("command %q: say whether it changes something", name)
		}
	}
	w.db.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 0)")
	order := slices.Sorted(maps.Keys(changing)) // uninstall must be the last
	for _, name := range order {
		args := append(strings.Fields(name), changing[name]()...)
		before := time.Now()
		r := w.once(append(args, "--log-level=info")...)
		if r.code != 0 {
			t.Errorf("%v: exit %d: %s%s", args, r.code, r.out, r.errOut)
		}
		if strings.Count(r.errOut, `"component":"audit"`) != 1 ||
			!strings.Contains(r.errOut, `"action":"`+name+`","outcome":"ok"`) {
			t.Errorf("%s: logged %s", name, r.errOut)
		}
		l, err := audit.List(t.Context(), w.db.Pool, before.Add(-time.Minute), 1000)
		must(t, err)
		l = slices.DeleteFunc(l, func(e audit.Entry) bool { return e.Action != name })
		if len(l) != 1 || l[0].Outcome != "ok" || l[0].Source != "terminal" || !strings.Contains(l[0].Actor, "@") ||
			strings.Contains(r.errOut+string(l[0].Detail), "4111111111111111") {
			t.Errorf("%s left %+v", name, l)
		}
	}
	const rows = "SELECT count(*) FROM posthaste_audit" // two for each command
	w.has(2*len(changing), rows)
	// Commands that change nothing write no entry.
	w.once("mode")
	w.once("replay", "--all", "--dry-run")
	w.once("dead", "list")
	w.once("phantoms")
	w.has(2*len(changing), rows)
	var listed []audit.Entry
	w.once("audit", "--json", "--limit=2", "--since=1h").json(t, &listed)
	if len(listed) != 2 || listed[0].Action != "uninstall" {
		t.Errorf("listed %+v", listed)
	}
	w.once("audit").says(t, 0, order...)
	w.once("audit", "--since=yesterday").says(t, exitBadUsage)
	w.once("audit", "--limit=0").says(t, exitBadUsage)
	r := w.once("uninstall", "--yes", "--tables", "--log-level=info")
	if r.code != 0 || strings.Count(r.errOut, `"action":"uninstall","outcome":"ok"`) != 1 {
		t.Errorf("exit %d, logged %s", r.code, r.errOut)
	}
}
