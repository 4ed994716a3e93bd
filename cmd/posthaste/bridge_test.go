package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/bridge"
)

// debezium makes a table as Debezium documents it, with a column that says what a relay before has published.
func (w *world) debezium() (flags []string) {
	w.t.Helper()
	w.db.Exec(w.t, `CREATE TABLE outboxevent (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255),
		aggregateid varchar(255), type varchar(255), payload jsonb, n bigserial, sent boolean DEFAULT false)`)
	return []string{
		"--table=public.outboxevent", "--id=id", "--aggregate-type=aggregatetype", "--aggregate-id=aggregateid",
		"--event-type=type", "--payload=payload", "--pending=NOT sent", "--order-by=n",
	}
}

// Rows of a table that knows nothing of posthaste are published once and in order, also those that are deleted by the
// transaction that inserts them, while relays are killed.
func TestBridgedRowsArePublished(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		flags := w.debezium()
		insert := func(n int) {
			w.db.Exec(t, fmt.Sprintf(`INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload)
				SELECT 'order', 'a', 'made', to_jsonb(g) FROM generate_series(%d, %d) g`, n, n+2))
		}
		insert(1)
		w.once(append([]string{"bridge", "create", "--yes"}, flags...)...).says(t, 0, "3 waiting rows were copied")
		relay := w.relayIn(mode)
		last := 3
		var writer sync.WaitGroup
		stop := make(chan struct{})
		writer.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					insert(last + 1)
					w.db.Exec(t, fmt.Sprintf(`DO $$ BEGIN
						INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload)
						VALUES ('order', 'a', 'made', '%d');
						DELETE FROM outboxevent WHERE payload = '%d'; END $$`, last+4, last+4))
					last += 4
				}
			}
		})
		for kills := range 2 {
			w.waitLen("outbox.order", int64(100*(kills+1)))
			relay.kill()
			relay = w.spawn("relay")
		}
		w.waitLen("outbox.order", 300)
		close(stop)
		writer.Wait()
		w.waitLen("outbox.order", int64(last))
		w.oracle.WaitEmpty(t, 30*time.Second)
		var got, want []string
		for _, e := range w.oracle.Entries(t, "order") {
			got = append(got, e.Data)
		}
		for n := 1; n <= last; n++ {
			want = append(want, fmt.Sprint(n))
		}
		if !slices.Equal(got, want) {
			t.Errorf("published %v, want 1 to %d in order", got, last)
		}
	})
}

// Without --yes and without a terminal, create prints its SQL and the number of waiting rows, and changes nothing.
// Doctor, list, drop and uninstall know the bridge that it creates with --yes.
func TestBridgeCommands(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	flags := w.debezium()
	w.db.Exec(t, "INSERT INTO outboxevent (aggregatetype, aggregateid, type) VALUES ('order', 'a', 'made')")
	bridges := func() (list []bridge.Bridge) {
		t.Helper()
		w.once("bridge", "list", "--json").json(t, &list)
		return list
	}
	create := append([]string{"bridge", "create"}, flags...)
	dry := w.once(create...)
	dry.oneLine(t, 1, "--yes")
	dry.says(t, 1, "; 1 waiting rows are copied\n", "CREATE TRIGGER")
	if got := bridges(); len(got) != 0 {
		t.Errorf("the dry run has created %+v", got)
	}
	w.db.Exec(t, strings.SplitN(dry.out, "\n", 2)[1]) // what it prints can be run
	if got := bridges(); len(got) != 1 || got[0].Copied != 1 || got[0].Waiting != 0 {
		t.Errorf("the list is %+v", got)
	}
	w.once(append(create, "--yes")...).oneLine(t, 1, "posthaste bridge drop --table=public.outboxevent")
	w.once("bridge", "create", "--table=outboxevent", "--id=id", "--aggregate-type==a", "--aggregate-id=n",
		"--event-type==b", "--payload=payload").oneLine(t, 2, "want SCHEMA.NAME")
	w.once("doctor").says(t, 0, "each row inserted into public.outboxevent is copied")
	w.db.Exec(t, "ALTER TABLE outboxevent RENAME type TO kind")
	w.once("doctor").says(t, 1, `no column "type" (--event-type)`)
	w.db.Exec(t, "ALTER TABLE outboxevent RENAME kind TO type")
	w.once("bridge", "drop", "--table=public.outboxevent").oneLine(t, 1, "--yes")
	w.once("bridge", "drop", "--table=public.outboxevent", "--yes").says(t, 0)
	if got := bridges(); len(got) != 0 {
		t.Errorf("after the drop: %+v", got)
	}
	w.once(append(create, "--yes")...)
	w.once("uninstall", "--tables", "--force", "--yes").says(t, 0, "the bridge of public.outboxevent is gone")
	w.db.Exec(t, "INSERT INTO outboxevent (aggregatetype, aggregateid, type) VALUES ('order', 'a', 'made')")
	w.has(0, "SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
}

// Observed from outside, posthaste's own relay loses, repeats and reorders nothing while it is killed. An entry that is
// added a second time is found.
func TestShadow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	relay := w.relayIn("cdc")
	comparing := w.fork("", nil, "shadow", "--table=public.outbox", "--aggregate-id=aggregate_id",
		"--stream=outbox.order")
	comparing.waitLogged("reading public.outbox")
	for n := range 300 {
		w.db.Exec(t, fmt.Sprintf(`INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (gen_random_uuid(), 'order', '%d', 'x', '{}')`, n%7))
		if n == 100 {
			relay.kill()
			w.spawn("relay")
		}
	}
	w.waitLen("outbox.order", 300)
	again := w.redis.Client.XRangeN(t.Context(), "outbox.order", "-", "+", 1).Val()[0]
	must(t, w.redis.Client.XAdd(t.Context(), &redis.XAddArgs{Stream: "outbox.order", Values: again.Values}).Err())
	if code := comparing.stop(); code != 1 {
		t.Errorf("exit %d", code)
	}
	for _, line := range []string{
		"committed        300", "published        300", "lost             0", "repeated         1",
		"reordered        0", "commit to entry  p50 ", "repeated: event " + again.Values["id"].(string),
	} {
		comparing.waitLogged(line)
	}
	if comparing.logged("unknown") {
		t.Errorf("%s", comparing.output())
	}
	page := w.once("shadow", "--table=public.outbox", "--stream=outbox.order", "--for=1s", "--poll", "--order-by=seq")
	page.says(t, 0, "committed  0")
	w.once("shadow", "--table=outbox", "--stream=outbox.order").oneLine(t, 2, "want SCHEMA.NAME")
	w.once("shadow", "--table=public.none", "--stream=outbox.order").oneLine(t, 1, "does not exist")
}
