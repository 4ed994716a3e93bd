package main

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
)

// written checks that every row of the type is in its stream once, and that the backlog becomes empty.
func (w *world) written(typ string) {
	w.t.Helper()
	testenv.Eventually(w.t, 10*time.Second, func() error {
		want := map[string]int{}
		for _, id := range testenv.Value[[]string](w.t, w.db,
			"SELECT coalesce(array_agg(id::text), '{}') FROM outbox WHERE aggregate_type = $1", typ) {
			want[id] = 1
		}
		have := map[string]int{}
		for _, e := range w.oracle.Entries(w.t, typ) {
			have[e.ID]++
		}
		backlog := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_backlog")
		return testenv.FailIf(!maps.Equal(have, want) || backlog > 0,
			"%d events in the stream of %s, %d in the outbox, %d in the backlog", len(have), typ, len(want), backlog)
	})
}

// A row whose transaction is not the one that writes it would count as settled, or never be published: the server
// refuses it.
func TestAWriterCannotNameATransaction(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		w.relayIn(mode)
		w.delivers()
		const columns = "(xid, aggregate_type, aggregate_id, event_type, payload)"
		const rows = `SELECT xid, 'named', i::text, 'named', '{}' FROM generate_series(1, 20) i,
			(SELECT max(xid) AS xid FROM outbox WHERE aggregate_type = 'order') settled`
		future := strings.Replace(rows, "max(xid)", "(max(xid)::text::bigint + 1000000)::text::xid8", 1)
		for _, from := range []string{rows, future} {
			_, inserted := w.db.Pool.Exec(t.Context(), "INSERT INTO outbox "+columns+" "+from)
			_, copied := w.db.Pool.Exec(t.Context(), fmt.Sprintf(
				"COPY outbox %s FROM PROGRAM $$echo '%s'$$", columns,
				strings.ReplaceAll(testenv.Value[string](t, w.db, `SELECT string_agg(concat_ws(E'\t',
					xid, t, i, e, p), '|') FROM (`+from+`) x(xid, t, i, e, p)`), "|", "\n")))
			for how, err := range map[string]error{"INSERT": inserted, "COPY": copied} {
				if err == nil || !strings.Contains(err.Error(), "leave xid and seq out") {
					t.Errorf("%s: %v", how, err)
				}
			}
		}
		w.written("named")
		w.db.Exec(t, "INSERT INTO outbox "+columns+strings.Replace(rows, "xid,", "pg_current_xact_id(),", 1))
		w.db.Exec(t, "UPDATE outbox SET headers = '{}' WHERE aggregate_type = 'named'")
		w.written("named")
		w.db.Exec(t, "REINDEX TABLE outbox")
		w.delivers()
	})
}

// A subscription that writes rows of another outbox into one that a relay leads is refused, until the publication
// leaves out what the server has to set. Then they are events like others.
func TestASubscriptionWritesIntoTheOutbox(t *testing.T) {
	t.Parallel()
	inMode(t, "cdc", func(t *testing.T, mode string) {
		server := testenv.NewServer(t)
		source, w := server.Database(t), worldOf(t, server.Database(t), testenv.Redis(t))
		if testenv.Value[int](t, source, "SELECT current_setting('server_version_num')::int") < 150000 {
			t.Skip("publications have column lists since Postgres 15")
		}
		write := func(n int) {
			source.Exec(t, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'far', i::text, 'far', '{}' FROM generate_series(1, $1) i`, n)
		}
		source.Exec(t, "SELECT setval('outbox_seq_seq', 100000)") // beyond the numbers of the other one
		write(20)
		w.relayIn(mode)
		w.delivers()
		source.Exec(t, "CREATE PUBLICATION far FOR TABLE outbox")
		source.Exec(t, "SELECT pg_create_logical_replication_slot('far', 'pgoutput')")
		w.db.Exec(t, fmt.Sprintf(`CREATE SUBSCRIPTION far CONNECTION '%s' PUBLICATION far
			WITH (create_slot = false, slot_name = 'far')`, source.URL))
		testenv.Eventually(t, 20*time.Second, func() error {
			var failed, arrived int
			err := w.db.Pool.QueryRow(t.Context(), `SELECT sync_error_count, (SELECT count(*) FROM outbox
				WHERE aggregate_type = 'far') FROM pg_stat_subscription_stats`).Scan(&failed, &arrived)
			return testenv.FailIf(err != nil || failed+arrived == 0, "the subscription is not refused, %w", err)
		})
		w.written("far")
		source.Exec(t, `ALTER PUBLICATION far SET TABLE outbox (id, aggregate_type, aggregate_id, event_type, payload,
			headers, created_at)`)
		arrived := func(n int) { w.waitHas(n, "SELECT count(*) FROM outbox WHERE aggregate_type = 'far'") }
		arrived(20)
		w.written("far")
		write(20)
		arrived(40)
		w.written("far")
		w.delivers()
	})
}

// The rows and marks of a database are restored, without its schema, into one that was migrated and that no relay has
// led, on a server whose transactions have lower numbers, or higher ones. What was settled stays settled, and what was
// not is published. With the rows that a migration writes, only those are refused.
func TestTheDataAloneIsRestored(t *testing.T) {
	t.Parallel()
	for _, ahead := range []bool{false, true} {
		t.Run(fmt.Sprintf("ahead is %t", ahead), func(t *testing.T) {
			t.Parallel()
			inMode(t, map[bool]string{false: "cdc", true: "poll"}[ahead], func(t *testing.T, mode string) {
				w := worldOf(t, testenv.NewServer(t).Database(t), testenv.Redis(t))
				to := testenv.NewServer(t).Database(t)
				for _, d := range map[bool][]*testenv.Database{true: {to}, false: {w.db}}[ahead] {
					d.Exec(t, `DO $$ BEGIN
						FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`)
				}
				r := w.relayIn(mode, "--stream-maxlen=0")
				first := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 300})
				w.waitSettled(150)
				r.kill()
				w.waitCommitted(first, first.Committed()+60)
				first.Stop()
				if ahead { // as a whole
					errOut := restore(t, to, dump(t, w.db, "--data-only"))
					if strings.Count(errOut, "ERROR: ") != 2 || !strings.Contains(errOut, `"outbox_part_pkey"`) ||
						!strings.Contains(errOut, `"posthaste_migrations_pkey"`) {
						t.Errorf("psql: %s", errOut)
					}
				} else {
					data := dump(t, w.db, append([]string{"--data-only"}, withoutMigration...)...)
					if errOut := restore(t, to, data, "--single-transaction", "-v", "ON_ERROR_STOP=1"); errOut != "" {
						t.Fatalf("psql: %s", errOut)
					}
				}

				w.db, w.oracle.DB, w.pgURL, to.Relay = to, to, to.URL, w.db.Relay
				second := w.wrote(testenv.LoadOptions{Total: 60, Tag: "second-"})
				w.spawn("relay", "--stream-maxlen=0").waitUnready("foreign_stream")
				w.adopt()
				w.waitMode(mode)
				w.all(second, first)
				w.delivers()
				w.calm()
			})
		})
	}
}
