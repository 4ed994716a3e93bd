package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// deadEvent is one element of `dead list --json`.
type deadEvent struct {
	Source        string
	ID            string
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	Class         string
	Error         string
	Attempts      int
}

// dead waits until n events are parked.
func (w *world) dead(n int) (list []deadEvent) {
	w.t.Helper()
	w.waitHas(n, "SELECT count(*) FROM outbox_dead")
	if w.once("dead", "list", "--json").json(w.t, &list); len(list) != n {
		w.t.Fatalf("dead list --json: %+v, want %d", list, n)
	}
	return list
}

// insert writes one event and returns its id.
func (w *world) insert(typ, aggregate string, n int) string {
	w.t.Helper()
	id := uuid.NewString()
	w.db.Exec(w.t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, "+
		"$4, jsonb_build_object('n', $5::int))",
		id, typ, aggregate, typ+".changed", n)
	return id
}

// waitIDs waits until a stream has exactly these events, in this order.
func (w *world) waitIDs(stream string, ids ...string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		var have []string
		if w.redis.Client.Type(w.t.Context(), stream).Val() == "stream" {
			for _, m := range rawEntries(w.t, w, stream) {
				have = append(have, m["id"])
			}
		}
		return testenv.FailIf(strings.Join(have, " ") != strings.Join(ids, " "),
			"%s has %v, want %v", stream, have, ids)
	})
}

// Everything about a dead event is shown, that of the relay and that of a group; the payload on request only.
func TestDeadShow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := uuid.NewString()
	w.db.Exec(t, `INSERT INTO outbox_dead (id, seq, aggregate_type, aggregate_id, event_type, payload, headers,
		created_at, error, class, attempts)
		VALUES ($1, 1, 'order', 'a', 'order.made', '{"card": "4111"}', '{"traceparent": "00-hidden"}', now(),
		'too large', 'refused', 3)`, id)
	must(t, w.redis.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: "dead.outbox.order", Values: []any{
		"id", id, "type", "order.made", "subject", "a", "data", `{"card": "4111"}`, "headers", `{"tenant": "hidden"}`,
		"dead_stream", "outbox.order", "dead_entry", "7-0", "dead_group", "mailer", "dead_error", "no mail",
		"dead_attempts", "1", "dead_at", "2026-03-01T12:00:00.000000Z",
	}}).Err())
	w.once("dead", "show", id).says(t, 0,
		"source      relay\n", "dead after 3 attempts\n", "refused: too large\n", "headers     traceparent\n", "16 B\n",
		"source      mailer\n", "outbox.order 7-0\n", "dead after 1 attempt\n", "consumer: no mail\n",
		"2026-03-01T12:00:00Z",
		"headers     tenant\n", "posthaste dead retry "+id+", or posthaste dead drop "+id)
	var list []struct {
		Source  string
		Payload map[string]string
	}
	if w.once("dead", "show", "--payload", "--json", id).json(t, &list); len(list) != 2 ||
		list[0].Payload["card"] != "4111" || list[1].Payload["card"] != "4111" {
		t.Errorf("%+v", list)
	}
	for _, args := range [][]string{{"dead", "show", id}, {"dead", "show", "--json", id}} {
		if r := w.once(args...); strings.Contains(r.out, "4111") || strings.Contains(r.out, "hidden") {
			t.Errorf("%q shows the payload or the value of a header: %s", args, r.out)
		}
	}
	w.once("dead", "show", uuid.NewString()).oneLine(t, 1, "no dead event has this id")
	w.once("dead", "show", "nonsense").oneLine(t, 1, "no dead event has this id")
}

func TestPoisonIsParkedRetriedAndDropped(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		must(t, w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err())
		w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
		first, second := w.insert("bad", "a", 1), w.insert("bad", "b", 1)
		at := time.Now()
		list := w.dead(2)
		t.Logf("parked after %v", time.Since(at).Round(time.Millisecond))
		for _, d := range list {
			if d.Source != "relay" || d.AggregateType != "bad" || d.Class == "" || d.Error == "" ||
				(d.ID != first && d.ID != second) {
				t.Errorf("parked event %+v", d)
			}
		}
		w.once("dead", "drop", second).says(t, 0, second)
		w.dead(1)
		must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
		w.once("dead", "retry", "--json", first).says(t, 0, `"id": "`+first+`"`, `"ok": true`)
		w.waitIDs("outbox.bad", first)
		w.dead(0)
		w.ended(load)
	})
}

func TestPoisonBlocksItsAggregate(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		must(t, w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err())
		w.relayIn(mode, "--poison=block-key")
		ids := []string{w.insert("bad", "a", 1)}
		w.dead(1)
		must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
		// The stream would accept the events now. The aggregate still waits; other aggregates do not.
		ids = append(ids, w.insert("bad", "a", 2), w.insert("bad", "a", 3))
		free := w.insert("bad", "b", 1)
		w.waitIDs("outbox.bad", free)
		w.dead(3)
		if r := w.once("dead", "retry", "--all"); r.code != 0 || strings.Count(r.out, "\n") != 3 {
			t.Errorf("dead retry --all: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
		w.dead(0)
		ids = append(ids, w.insert("bad", "a", 4))
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
	})
}

// blocks makes a stream with one entry take no other, because its last id is the maximum.
func (w *world) blocks(stream string) (mend func()) {
	w.t.Helper()
	only := w.redis.Client.XRange(w.t.Context(), stream, "-", "+").Val()[0].ID
	do(w.t, w.redis.Client, "xsetid", stream, "18446744073709551615-18446744073709551615")
	return func() { do(w.t, w.redis.Client, "xsetid", stream, only) }
}

// A stream accepts no event, because its last id is the maximum. The events of other streams are published, and
// readiness names the stream. After it is repaired, it gets the missing events in order.
func TestAStreamThatTakesNothingHoldsUpItself(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		w.waitIDs("outbox.full", w.insert("full", "a", 1))
		mend := w.blocks("outbox.full")
		// The rows are in every part of the table.
		w.db.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
			SELECT type, 'a' || n, type || '.changed', '{}'
			FROM generate_series(1, 120) n, (VALUES ('full'), ('order')) t(type)`)
		ids := testenv.Value[[]string](t, w.db,
			"SELECT array_agg(id::text ORDER BY seq) FROM outbox WHERE aggregate_type = 'full'")
		r.waitUnready("streams: publishing to outbox.full is blocked")
		load := w.wrote(testenv.LoadOptions{Total: 1200})
		total := 120 + int64(load.Committed()) // also later events
		w.waitExactly("outbox.order", total)
		mend()
		w.waitExactly("outbox.full", int64(len(ids)))
		if mode == "cdc" { // in this mode the order is that of the table
			w.waitIDs("outbox.full", ids...)
		}
		w.oracle.WaitEmpty(t, 20*time.Second)
		r.waitReady("")
		w.dead(0)
	})
}

// A relay that starts while a stream takes nothing cannot stream: it would have to settle what waits for that stream
// first. It sweeps, and publishes the later events of the other streams. It streams when the stream takes events again.
func TestARelayStartsWhileAStreamTakesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.waitIDs("outbox.full", w.insert("full", "a", 1))
	mend := w.blocks("outbox.full")
	w.insert("full", "a", 2)
	r.kill()
	r = w.spawn("relay")
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300})
	for n := int64(300); n <= 1500; n += 300 { // longer than a pass may wait
		w.waitLen("outbox.order", n)
	}
	w.waitMode("poll")
	r.waitUnready("")
	mend()
	w.waitMode("cdc")
	w.ended(load)
	w.hasLen("outbox.full", 2)
	r.waitReady("")
}

// A relay that starts while one stream cannot be adopted, here because its gate has another type, leaves it out: the
// others are streamed. When that is mended, it is adopted, and nothing is published twice.
func TestARelayStartsWhileAStreamCannotBeAdopted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.relayIn("cdc")
	w.waitIDs("outbox.full", w.insert("full", "a", 1))
	w.waitSettled(1)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300})
	w.waitLen("outbox.order", 300)
	r.kill()
	gate := w.gate("outbox.full")
	do(t, w.redis.Client, "set", gate, "x")
	r = w.spawn("relay")
	const adopt = "adopt: nothing is published to outbox.full until it can be adopted: look at stream " +
		`"outbox.full": GATETYPE`
	r.waitReady(adopt)
	w.waitMode("cdc")
	w.waitLen("outbox.order", w.length("outbox.order")+300)
	w.insert("full", "a", 2)
	r.waitUnready("streams: publishing to outbox.full is blocked")
	w.waitLen("outbox.order", w.length("outbox.order")+300)
	do(t, w.redis.Client, "del", gate)
	r.waitReady("")
	w.ended(load)
	w.hasLen("outbox.full", 2)
}

// A row whose text cannot be represented in UTF-8 is parked and named. The following rows are delivered, in the desired
// mode.
func TestTextThatUTF8LacksIsParked(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := worldOf(t, testenv.Encoded(t, "WIN1252"), testenv.Redis(t))
		var ids []string
		insert := func(aggregate, typ, payload, headers string) {
			id := uuid.NewString()
			w.db.Exec(t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers) SELECT '"+
				id+"', 'word', "+aggregate+", "+typ+", jsonb_build_object('n', "+payload+
				"), jsonb_build_object('traceparent', "+headers+")")
			ids = append(ids, id)
		}
		insert("'a'", "repeat(chr(129), 255)", "1", "''") // the byte 0x81 has no equivalent in UTF-8
		w.once("trace", ids[0]).says(t, 0, `\201\201`)
		r := w.relayIn(mode, "--poison=block-key")
		insert("'gr' || chr(252) || 'n'", "'x' || chr(129)", "1", "''")
		insert("'gr' || chr(252) || 'n'", "'behind'", "1", "''")
		insert("(SELECT string_agg(chr(129 + n % 2 * 14), '') FROM generate_series(1, 1024) n)", "'x'", "1", "''")
		insert("'b'", "'x'", "chr(129)", "''")
		insert("'c'", "'x'", "1", "'x' || chr(129)")
		w.delivers()
		for i, d := range w.dead(len(ids)) {
			aggregate := []string{"a", "gr\u00fcn", "gr\u00fcn", strings.Repeat(`\217\201`, 32)[:255], "b", "c"}[i]
			class, reason := "unreadable", `in encoding "WIN1252" has no equivalent`
			if i == 2 {
				class, reason = "blocked", "waits for dead event "+ids[1]
			}
			if d.ID != ids[i] || d.AggregateID != aggregate || d.Class != class || !strings.Contains(d.Error, reason) {
				t.Errorf("parked event %d: %+v", i, d)
			}
			w.once("trace", d.ID).says(t, 0, reason)
		}
		w.once("status").says(t, 0)
		left := r.value(`outbox_mode_switches_total{from="cdc",reason="decode",to="poll"}`)
		if (left > 0) != (mode == "cdc") {
			t.Errorf("the stream was left %v times because of text", left)
		}
		for _, path := range []string{"/relay/dead", "/console/api/dead", "/console/api/trace?id=" + ids[0]} {
			if code, err := r.get(path, nil); code != http.StatusOK || err != nil {
				t.Errorf("%s: %d, %v", path, code, err)
			}
		}
		w.once("doctor").says(t, 0, "warn  encoding")
		for i, id := range ids[:2] {
			if r := w.once("dead", "retry", id); r.code == 0 || !strings.Contains(r.errOut+r.out, "only be dropped") {
				t.Errorf("retry of event %d: exit %d: %s%s", i, r.code, r.out, r.errOut)
			}
		}
		w.once("dead", "drop", "--all", "--yes").says(t, 0)
		w.dead(0)
		w.waitMode(mode)
		w.delivers()
	})
}

// A leader parks an event that Redis refuses. It loses its connection while its statement is in a socket. Its successor
// finds Redis healthy and publishes the event. When the statement arrives, it parks nothing: an event is in its stream
// or dead, never both.
func TestALateParkParksNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := testenv.NewLink(t, hostOf(t, w.db.URL))
	direct := w.pgURL
	w.pgURL = strings.Replace(direct, hostOf(t, direct), h.Addr(), 1)
	const nobody = "--redis-durability=replicas=1" // there is no replica, so nothing is settled
	leader := w.relayIn("cdc", nobody)
	first := w.insert("bad", "a", 1)
	w.waitIDs("outbox.bad", first)
	must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
	must(t, w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err())
	const class = "wrongtype" // an argument of the statement
	h.HoldFrom(class)
	second := w.insert("bad", "b", 1)
	testenv.Eventually(t, 20*time.Second, func() error {
		return testenv.FailIf(h.Held(class) == 0, "nothing is parked")
	})
	h.Hold(true)
	must(t, w.redis.Client.Del(t.Context(), "outbox.bad").Err())
	w.pgURL = direct
	successor := w.spawn("relay", nobody)
	times := func() (n int) {
		for _, e := range rawEntries(t, w, "outbox.bad") {
			if e["id"] == second {
				n++
			}
		}
		return n
	}
	testenv.Eventually(t, 30*time.Second, func() error {
		typ := w.redis.Client.Type(t.Context(), "outbox.bad").Val()
		return testenv.FailIf(typ != "stream" || times() == 0, "event %s is not published", second)
	})
	h.Release()
	testenv.Eventually(t, 20*time.Second, func() error {
		n := h.Late()
		return testenv.FailIf(n > 0, "%d connections are left over", n)
	})
	leader.kill() // otherwise it would lead again, and settle nothing
	successor.kill()
	w.spawn("relay")
	w.oracle.WaitEmpty(t, 20*time.Second)
	w.has(0, "SELECT count(*) FROM outbox_dead")
	if n := times(); n != 1 {
		t.Errorf("the event is %d times in its stream", n)
	}
}

// Row security hides the rows of the table from a relay that does not own it. The views show them: events are published
// in both modes, and doctor names the actions that the relay cannot do.
func TestRowSecurityIsNotAnEmptyTable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	owner := w.pgURL
	w.pgURL = w.role("REPLICATION")
	r := w.relayIn("cdc")
	w.fix("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	w.delivers()
	w.switches(r, "poll")
	w.delivers()
	w.once("doctor").says(t, 1, "fail  row security")
	w.pgURL = owner
	w.fix("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
	w.desire("auto")
	r.waitReady("")
	w.delivers()
}
