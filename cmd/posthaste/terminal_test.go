package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/lab/testenv/commandline"
	"posthaste/internal/ops"
)

// onTerminal starts a command on a terminal.
func (w *world) onTerminal(columns int, args ...string) *child {
	w.t.Helper()
	person, tty := testenv.Terminal(w.t, columns)
	args = append(w.args("--log-level=error", "--admin-addr="), args...)
	cmd := program(context.Background(), "", []string{"TERM=xterm", "NO_COLOR="}, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	c := launch(w.t, cmd, person)
	_ = tty.Close()
	return c
}

// A single Ctrl-C at a question ends the command. A terminal shows the result of a change, without the line for the
// log. The entry is in the table.
func TestOnATerminal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.onTerminal(80, "uninstall", "--tables")
	p.waitLogged("[y/N]")
	p.signal(syscall.SIGINT)
	p.ends(1, "posthaste: nothing was done")
	w.has(true, "SELECT to_regclass('orders') IS NOT NULL")
	before := testenv.Value[int](t, w.db, "SELECT count(*) FROM posthaste_audit")
	p = w.onTerminal(200, "mode", "poll", "--log-level=info")
	<-p.done
	got := p.output()
	if strings.Contains(got, "audit") || !strings.HasSuffix(got, "desired poll, active standby\r\n") {
		t.Errorf("printed %q", got)
	}
	w.has(before+2, "SELECT count(*) FROM posthaste_audit")
}

// Names and texts set by others (groups, subjects, errors of handlers) must not send control sequences to the terminal
// in an error, and must not widen a table to the width of the screen.
func TestErrorsAndTablesTakeNoOrders(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const hostile = "g\x1b[2J\r\u202eé"
	ctx, client := t.Context(), w.redis.Client
	must(t, client.XGroupCreateMkStream(ctx, "outbox.order", hostile, "0").Err())
	long := strings.Repeat("x", 1000)
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, created_at, error, `+
		`class, attempts)
		VALUES (gen_random_uuid(), 1, 'order', $1, 'order.made', now(), $2, 'other', 3)`, long, hostile+long)
	for _, args := range [][]string{
		{"groups", "list"},
		{"groups", "drop", "--stream=outbox.order", "--group=none", "--yes"},
		{"groups", "drop", "--stream=outbox.order", "--group=" + hostile},
		{"dead", "list"},
	} {
		r := w.once(args...)
		text := r.out + r.errOut
		if strings.ContainsFunc(text, func(c rune) bool { return c != '\n' && !unicode.IsPrint(c) }) {
			t.Errorf("%q: %q", args, text)
		}
		for line := range strings.Lines(text) {
			if len(line) > 500 {
				t.Errorf("%q: a line of %d bytes", args, len(line))
			}
		}
	}
}

// Without Redis, a trace prints the steps that Postgres has recorded.
func TestTraceWithoutRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.keep(1, "outbox.order")
	w.db.Exec(t, `UPDATE outbox_mark SET entries = '{"outbox.order": "1-0"}' WHERE epoch > 0`)
	w.rdURL = "redis://127.0.0.1:1"
	r := w.once("trace", ids[0])
	r.says(t, 1, "settled   "+ids[0])
	r.warns(t, 1, "refuses")
	r = w.once("trace", "--json", ids[0])
	var steps []ops.Step
	if err := json.Unmarshal([]byte(r.out), &steps); err != nil || r.code != 1 || len(steps) != 2 {
		t.Errorf("exit %d, %v: %s", r.code, err, r.out)
	}
}

// A key belongs to a user. A trace of a key without a user reports that the user is missing, and not that the key is
// unknown.
func TestTraceOfAKeyWithoutItsUser(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	o := w.placeTraced(w.spawn("serve"), "")
	for _, args := range [][]string{{"trace", o.key}, {"trace", "--json", o.key}, {"trace", "no-uuid"}} {
		r := w.once(args...)
		if r.oneLine(t, 1, "an idempotency key is found only with its user (--user=USER)"); r.out != "" {
			t.Errorf("%v prints %q", args, r.out)
		}
	}
	w.once("trace", o.key, "--user="+o.user).says(t, 0, o.id)
}

// status works for a role that may only read.
func TestStatusWantsNoRightToWrite(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.once("status")
	w.pgURL = w.role("")
	w.db.Exec(t, "REVOKE INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public FROM role_"+w.db.Relay)
	w.once("status").says(t, 0, "mode")
	w.once("mode", "poll").oneLine(t, 1, "see docs/operations.md")
}

// A standby may lack events that were just published, and the command could not detect that. So it refuses to replay
// from a standby.
func TestCommandsOnAStandby(t *testing.T) {
	t.Parallel()
	w, server := onServer(t)
	w.keep(5, "outbox.order")
	w.once("status") // records the relay's name
	must(t, errors.Join(server.Stop("fast"), os.WriteFile(filepath.Join(server.Dir, "data", "standby.signal"), nil,
		0o644), server.Start(t.Context())))
	w.once("replay", "--all", "--to=side").oneLine(t, 1, "point --postgres-url at the primary")
	w.once("mode", "poll").oneLine(t, 1, "point --postgres-url at the primary")
	if n := w.redis.Client.Exists(t.Context(), "side").Val(); n != 0 {
		t.Error("something was replayed")
	}
	must(t, errors.Join(server.Stop("fast"), os.Remove(filepath.Join(server.Dir, "data", "standby.signal")),
		server.Start(t.Context()))) // otherwise its databases could not be dropped
}

// A slot fills the disk whether or not the tables exist, so uninstall drops it without them. While a relay runs, it
// would be created again.
func TestUninstallWithoutASchema(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relayIn("cdc")
	w.once("uninstall", "--yes").warns(t, 0, "a relay is running")

	w = newWorld(t)
	slot := "posthaste_" + w.db.Relay
	w.db.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	w.db.Exec(t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 99)")
	w.once("uninstall", "--tables", "--yes").oneLine(t, 1, "newer than this binary")
	w.db.Exec(t, "DROP SCHEMA public CASCADE")
	r := w.once("uninstall", "--yes", "--json")
	if got := r.compact(); r.code != 0 || got != `{"slot":true,"publication":true,"tables":false}` {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.errOut)
	}
	w.has(0, "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1", slot)

	// Slot names are shared by all databases of a server. Uninstalling from one database keeps the slot of another.
	w = newWorld(t)
	other, slot := testenv.Postgres(t), "posthaste_"+w.db.Relay
	other.Exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	defer other.Exec(t, "SELECT pg_drop_replication_slot($1)", slot)
	w.once("uninstall", "--yes", "--tables").says(t, 0, "slot "+slot+" belongs to another database and was kept",
		"publication posthaste is gone", "the tables are gone")
}

// The time limit applies per dead event, so many events may take longer. Ctrl-C ends the command between two of them.
func TestManyDeadEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, created_at, `+
		`error, class, attempts)
		SELECT gen_random_uuid(), g, 'order', 'o', 'order.made', '{}', now(), 'no', 'other', 3 FROM `+
		`generate_series(1, 1001) g`)
	r := w.once("dead", "list")
	if n := strings.Count(r.out, "\n"); r.code != 0 || n != 1001 || !strings.Contains(r.errOut, "1,001") {
		t.Errorf("exit %d, %d lines: %s", r.code, n, r.errOut)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var deadlines []time.Time
	var out bytes.Buffer
	e := &env{
		config: commandline.Config(t, "--postgres-url="+w.pgURL, "--redis-url="+w.rdURL),
		IO:     cli.IO{Stdout: &out, Stderr: &out},
	}
	err := deadChosen{All: true}.each(ctx, e, audit.DeadDrop, false, ops.DeadAction{
		Done: "is done",
		Relay: func(ctx context.Context, _ *pgxpool.Pool, _ uuid.UUID) error {
			d, _ := ctx.Deadline()
			if deadlines = append(deadlines, d); len(deadlines) == 3 {
				cancel()
			}
			return nil
		},
	})
	if n := len(deadlines); n != 3 || !errors.Is(err, context.Canceled) || strings.Count(out.String(), "is done") != 3 {
		t.Fatalf("%d events, error %v", n, err)
	}
	if slices.ContainsFunc(deadlines[1:], func(d time.Time) bool { return !d.After(deadlines[0]) }) {
		t.Errorf("all of them share one deadline: %v", deadlines)
	}
}
