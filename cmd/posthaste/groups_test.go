package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

// groupLine is the output of groups list --json for a group.
type groupLine struct {
	Stream, Group          string
	Pending, Lag, Lost     int64
	HoldsBack              int64   `json:"holds_back"`
	Idle                   float64 `json:"idle_seconds"`
	OldestPending          float64 `json:"oldest_pending_seconds"`
	Abandoned              bool
	StreamLength, Consumer int64
	Streams                []groupLine
}

func (w *world) listGroups(extra ...string) map[string]groupLine {
	w.t.Helper()
	var list []groupLine
	w.once(append([]string{"groups", "list", "--json"}, extra...)...).json(w.t, &list)
	m := map[string]groupLine{}
	for _, g := range list {
		m[g.Stream+" "+g.Group] = g
	}
	return m
}

func (w *world) readGroup(group string, count int64) {
	w.t.Helper()
	err := w.redis.Client.XReadGroup(w.t.Context(), &redis.XReadGroupArgs{
		Group: group, Consumer: "c", Streams: []string{"outbox.order", ">"}, Count: count, Block: -1,
	}).Err()
	must(w.t, err)
}

// An abandoned group holds back a stream until it is dropped: then the relay trims what the others have read. Its dead
// events are dropped, too, because no group could retry them. Those of other groups stay.
func TestGroupsListAndDrop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "stream-node-max-entries 10")
	ctx, client := t.Context(), w.redis.Client
	for _, group := range []string{"gone", "mailer"} {
		must(t, client.XGroupCreateMkStream(ctx, "outbox.order", group, "0").Err())
	}
	// The entries are two hours old, so that they count as unread for that long.
	for i := range 3 {
		id := fmt.Sprintf("%d-0", time.Now().Add(-2*time.Hour).UnixMilli()+int64(i))
		must(t, client.XAdd(ctx, &redis.XAddArgs{
			Stream: "outbox.order", ID: id, Values: []any{"id", fmt.Sprint(i)},
		}).Err())
	}
	w.spawn("relay", "--stream-maxlen=100")
	load := w.wrote(testenv.LoadOptions{Total: 500, Types: []string{"order"}})
	w.oracle.WaitEmpty(t, 20*time.Second)
	n := int64(load.Committed() + 3)
	w.readGroup("mailer", n)
	must(t, client.XAutoClaim(ctx, &redis.XAutoClaimArgs{
		Stream: "outbox.order", Group: "mailer", Consumer: "c", Start: "0",
	}).Err())

	for _, group := range []string{"gone", "mailer", "gone"} {
		w.gaveUp("outbox.order", group, "1-0", map[string]any{"id": "1"})
	}
	do(t, client, "xgroup", "create", "dead.outbox.order", "watcher", "0")
	g := w.listGroups("--stream-maxlen=100")
	if len(g) != 3 || g["dead.outbox.order watcher"].Lag != 3 {
		t.Errorf("groups %+v, want that of the dead stream too", g)
	}
	if gone := g["outbox.order gone"]; !gone.Abandoned || gone.Lag != n || gone.HoldsBack != n-100 || gone.Lost != 0 ||
		gone.Idle < 7200 {
		t.Errorf("the abandoned group: %+v", gone)
	}
	if m := g["outbox.order mailer"]; m.Abandoned || m.Pending != n || m.Lag != 0 {
		t.Errorf("the group that is read: %+v", m)
	}
	w.once("groups", "list", "--stream-maxlen=100").says(t, 0, "STREAM", "abandoned",
		fmt.Sprintf("group gone holds back about %d entries of outbox.order", n-100),
		"posthaste groups drop --stream=outbox.order --group=gone")
	if force := w.listGroups("--stream-maxlen=100", "--trim=force")["outbox.order gone"]; force.HoldsBack != 0 {
		t.Errorf("with --trim=force nobody holds anything back: %+v", force)
	}

	drop := func(group string, extra ...string) result {
		return w.once(append([]string{"groups", "drop", "--stream=outbox.order", "--group=" + group}, extra...)...)
	}
	drop("gone").oneLine(t, 1, "--yes")
	drop("mailer", "--yes").oneLine(t, 1, `consumer "c" was active`)
	drop("nobody", "--yes").oneLine(t, 1, `no consumer group "nobody"; it has: gone, mailer`)
	w.once("groups", "drop", "--stream=other", "--group=gone", "--yes").oneLine(t, 1,
		`"other" is no stream of posthaste`)
	drop("gone", "--yes").says(t, 0, fmt.Sprintf("0 pending, %d unread and 2 dead", n))
	w.hasLen("outbox.order", n) // what mailer has read but not acknowledged stays
	dead, err := client.XRange(ctx, "dead.outbox.order", "-", "+").Result()
	if err != nil || len(dead) != 1 || dead[0].Values["dead_group"] != "mailer" {
		t.Errorf("dead events left: %v (%v)", dead, err)
	}
	drop("mailer", "--yes", "--force").says(t, 0, fmt.Sprintf("%d pending, 0 unread and 1 dead", n))
	testenv.Eventually(t, 20*time.Second, func() error {
		n, err := client.XLen(ctx, "outbox.order").Result()
		return testenv.FailIf(err != nil || n > 110, "%d entries (%w), want about 100", n, err)
	})
	if left := w.listGroups(); len(left) != 1 {
		t.Errorf("groups that were dropped: %v", left)
	}
}

// A group of a type with several streams is listed once, including its streams of earlier numbers of streams. A type
// with the name of one of these streams is separate. A command with the type's name applies to all the streams; a
// command with a stream's name only to that stream.
func TestGroupsOfATypeWithSeveralStreams(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx, client := t.Context(), w.redis.Client
	r := w.relayIn("poll")
	w.insert("order", "before", 1)
	w.insert("order.9", "another type", 1)
	w.oracle.WaitEmpty(t, 20*time.Second)
	for _, stream := range []string{"outbox.order", "outbox.order.9"} {
		do(t, client, "xgroup", "create", stream, "mailer", "0")
	}
	w.readGroup("mailer", 1)
	for _, m := range client.XRange(ctx, "outbox.order", "-", "+").Val() {
		do(t, client, "xack", "outbox.order", "mailer", m.ID)
	}
	do(t, client, "xgroup", "setid", "outbox.order.9", "mailer", "$", "entriesread", "1")
	r.kill()
	w.spreads(4)
	r = w.spawn("relay")
	for i := range 40 {
		w.insert("order", strconv.Itoa(i), 1)
	}
	w.oracle.WaitEmpty(t, 20*time.Second)
	do(t, client, "xgroup", "create", "outbox.order.1", "beside", "0")
	w.gaveUp("outbox.order.1", "mailer", "1-0", map[string]any{"id": "1"})

	w.once("dead", "list", "--json").says(t, 0, `"aggregate_type": "order",`)
	list := w.listGroups()
	g := list["outbox.order mailer"]
	sum := int64(0)
	for _, on := range g.Streams {
		sum += on.Lag
	}
	if len(list) != 3 || len(g.Streams) != 5 || g.Lag != 40 || sum != 40 ||
		list["outbox.order.9 mailer"].Streams != nil {
		t.Errorf("groups %+v", list)
	}
	table := w.once("groups", "list").out
	if !regexp.MustCompile(`(?m)^outbox\.order  +mailer .* 40 .* 5$`).MatchString(table) {
		t.Errorf("groups list:\n%s", table)
	}
	info := func(stream, base string) string { // dashboards distinguish types by this
		return fmt.Sprintf(`outbox_stream_info{base="outbox.%s",stream="outbox.%s"} 1`, base, stream)
	}
	present(t, r, info("order", "order"), info("order.0", "order"), info("order.3", "order"),
		info("order.9", "order.9"))
	// When Redis is nearly full, the command must not wait for Postgres, where a relay has recorded which types are
	// spread.
	there := w.pgURL
	w.pgURL = "postgres://127.0.0.1:1/none"
	var alone []groupLine
	if w.once("groups", "list", "--json").json(t, &alone); len(alone) != 2 || alone[1].Lag != 40 {
		t.Errorf("without Postgres: %+v", alone)
	}
	w.pgURL = there

	drop := func(stream string, extra ...string) result {
		return w.once(append([]string{"groups", "drop", "--stream=" + stream, "--group=mailer", "--yes"}, extra...)...)
	}
	if r := drop("outbox.order.2"); r.code != 0 || strings.Contains(r.out, "outbox.order.1") {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.errOut)
	}
	drop("outbox.order").oneLine(t, 1, `"outbox.order": consumer "c" was active`)
	if g := w.listGroups()["outbox.order mailer"]; len(g.Streams) != 4 {
		t.Errorf("one was dropped of %+v", g.Streams)
	}
	drop("outbox.order", "--force").says(t, 0,
		"1 dead", "outbox.order, outbox.order.0, outbox.order.1, outbox.order.3")
	left := w.listGroups()
	if _, there := left["outbox.order beside"]; len(left) != 2 || !there || left["outbox.order.9 mailer"].Stream == "" {
		t.Errorf("left: %+v", left)
	}
	w.hasLen("dead.outbox.order.1", 0)
	drop("outbox.order").oneLine(t, 1, `"outbox.order" has no consumer group "mailer"; it has: beside`)
}

// Redis is nearly full while Postgres is down. The commands work as far as Redis alone allows, and a drop reports that
// it has no audit entry.
func TestGroupsWithoutPostgres(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.pgURL = "postgres://127.0.0.1:1/none"
	must(t, w.redis.Client.XGroupCreateMkStream(t.Context(), "outbox.order", "gone", "0").Err())
	r := w.once("groups", "list")
	r.says(t, 0, "outbox.order  gone")
	r.warns(t, 0, "without Postgres")
	r = w.once("groups", "drop", "--stream=outbox.order", "--group=gone", "--yes", "--log-level=info")
	r.warns(t, 0, "not in posthaste_audit")
	if strings.Count(r.errOut, `"action":"groups drop","outcome":"ok"`) != 1 {
		t.Errorf("logged %s", r.errOut)
	}
	w.rdURL = "redis://127.0.0.1:1"
	w.once("groups", "list").warns(t, 1, "refuses")
}
