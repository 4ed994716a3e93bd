package main

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

// postgresProgram returns a command for a program of Postgres that connects to d. It removes the parameters of d's URL
// that only pgx accepts.
func postgresProgram(t *testing.T, d *testenv.Database, name string, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := local.PostgresBin(t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	must(t, err)
	u, err := url.Parse(d.URL)
	must(t, err)
	q := u.Query()
	for name := range q {
		if strings.HasPrefix(name, "pool_") {
			q.Del(name)
		}
	}
	u.RawQuery = q.Encode()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return exec.CommandContext(ctx, filepath.Join(bin, name), append(args, u.String())...)
}

// withoutMigration are the options of pg_dump that leave out the rows that a migration writes.
var withoutMigration = []string{
	"--exclude-table-data=*.outbox_part", "--exclude-table-data=*.posthaste_migrations",
}

// dump returns the output of pg_dump.
func dump(t *testing.T, d *testenv.Database, args ...string) []byte {
	t.Helper()
	out, err := postgresProgram(t, d, "pg_dump", args...).Output()
	if err != nil {
		t.Fatalf("pg_dump: %v", err)
	}
	return out
}

// restore runs psql and returns its errors.
func restore(t *testing.T, d *testenv.Database, script []byte, options ...string) string {
	t.Helper()
	cmd := postgresProgram(t, d, "psql", append([]string{"-q", "-X", "-o", os.DevNull}, options...)...)
	var errOut bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(script), &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("psql: %v: %s", err, errOut.String())
	}
	return errOut.String()
}

// A new server is migrated, the data of a dump are restored to it, and it adopts the streams. No event is published
// twice, and none is lost: neither the settled events nor those that were pending when the dump was made.
func TestDataOfADumpAreRestored(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{"without the rows of the migration": withoutMigration, "all": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			r := w.relayIn("cdc")
			settled := w.wrote(testenv.LoadOptions{Total: 60, Tag: "settled-"})
			w.waitSettled(int64(settled.Committed()))
			r.kill()
			pending := w.wrote(testenv.LoadOptions{Total: 60, Tag: "pending-"})

			to := worldOf(t, testenv.NewServer(t).Database(t), w.redis)
			to.db.Relay = w.db.Relay
			data := dump(t, w.db, append([]string{"--data-only"}, args...)...)
			var stop []string
			if args != nil {
				stop = []string{"--single-transaction", "-v", "ON_ERROR_STOP=1"}
			}
			var failed []string
			for line := range strings.Lines(restore(t, to.db, data, stop...)) {
				if _, text, ok := strings.Cut(line, "ERROR:  "); ok {
					failed = append(failed, strings.TrimSpace(text))
				}
			}
			want := `duplicate key value violates unique constraint "outbox_part_pkey", ` +
				`duplicate key value violates unique constraint "posthaste_migrations_pkey"`
			if args != nil {
				want = ""
			}
			if got := strings.Join(failed, ", "); got != want {
				t.Errorf("the restore fails with %q, want %q", got, want)
			}

			r = to.spawn("relay")
			r.waitReady(t, http.StatusServiceUnavailable, "foreign_stream", 30*time.Second)
			to.adopt()
			to.waitMode("cdc", 30*time.Second)
			to.all(pending, settled)
			to.delivers()
			to.calm()
		})
	}
}

// A dump of the whole database, made under a running relay, is restored in place of the original, which no other relay
// has led since: over its tables, as a new database, or on another server. The events that were in flight are published
// once, and those of commits that are gone are named.
func TestAWholeDumpIsRestored(t *testing.T) {
	t.Parallel()
	for _, place := range []string{"the tables", "the database", "another server"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			inModes(t, func(t *testing.T, mode string) {
				w := newWorld(t)
				via := testenv.Empty(t)
				r := w.relayIn(mode, "--stream-maxlen=0")
				load := func(tag string, n int) *testenv.Load {
					l := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: n, Tag: tag})
					l.Wait()
					return l
				}
				settled := load("settled-", 60)
				w.oracle.WaitEmpty(t, 20*time.Second)
				tx, err := w.db.Pool.Begin(t.Context())
				if err == nil {
					_, err = tx.Exec(t.Context(), "LOCK TABLE outbox_mark IN SHARE MODE") // nothing is settled
				}
				if err != nil {
					t.Fatal(err)
				}
				flying := load("flying-", 20)
				var options, stop []string
				if place == "the tables" {
					options = []string{"--clean"} // it drops what depends on something before it as well
				} else {
					stop = []string{"-v", "ON_ERROR_STOP=1"}
				}
				data := dump(t, w.db, options...)
				if err := tx.Rollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				w.oracle.WaitEmpty(t, 20*time.Second)
				gone := load("gone-", 60) // with it, the gate learns that those in flight are settled
				w.oracle.WaitEmpty(t, 20*time.Second)
				r.kill()

				w.db.Pool.Reset()
				switch place {
				case "the database":
					dropDatabase(t, via, w.db.Name)
					via.Exec(t, "CREATE DATABASE "+w.db.Name)
				case "another server":
					to := testenv.NewServer(t).Empty(t)
					to.Relay = w.db.Relay
					w.db, w.oracle.DB, w.pgURL = to, to, to.URL
				}
				restore(t, w.db, data, stop...)
				r = w.spawn("relay", "--stream-maxlen=0")
				if place != "the tables" {
					r.waitReady(t, http.StatusServiceUnavailable, "foreign_stream", 30*time.Second)
					w.adopt()
				}
				w.waitMode(mode, 30*time.Second)
				w.oracle.Others = []*testenv.Load{gone}
				w.all(settled, flying)
				if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM outbox_phantom"); n != gone.Committed() {
					t.Errorf("%d phantoms, want %d", n, gone.Committed())
				}
				w.delivers()
			})
		})
	}
}

// After a dump, the original publishes events that it does not settle: the gates cannot distinguish them from those of
// a relay that was killed. The copy names them, because a copy is always compared.
func TestACopyNamesWhatTheOriginalLeftUnsettled(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		settled := w.wrote(testenv.LoadOptions{Total: 60, Tag: "settled-"})
		w.oracle.WaitEmpty(t, 20*time.Second)
		data := dump(t, w.db)
		tx, err := w.db.Pool.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), "LOCK TABLE outbox_mark IN SHARE MODE") // nothing is settled
		must(t, err)
		gone := w.wrote(testenv.LoadOptions{Total: 20, Tag: "gone-"})
		w.waitLen("outbox.order", int64(settled.Committed()+gone.Committed()), 20*time.Second)
		r.kill()
		must(t, tx.Rollback(t.Context()))

		to := worldOf(t, testenv.NewServer(t).Empty(t), w.redis)
		to.db.Relay = w.db.Relay
		restore(t, to.db, data, "-v", "ON_ERROR_STOP=1")
		r = to.spawn("relay")
		r.waitReady(t, http.StatusServiceUnavailable, "foreign_stream", 30*time.Second)
		to.adopt()
		to.waitMode(mode, 30*time.Second)
		if n := testenv.Value[int](t, to.db, "SELECT count(*) FROM outbox_phantom"); n != gone.Committed() {
			t.Errorf("%d phantoms, want %d", n, gone.Committed())
		}
		to.oracle.Others = []*testenv.Load{gone}
		to.oracle.Check(t, settled, 30*time.Second)
	})
}
