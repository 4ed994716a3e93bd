package main

import (
	"bytes"
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/local"
	"posthaste/internal/lab/testenv"
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

// A dump of the whole database, made under a running relay, is restored in place of the original, which no other relay
// has led since: over its tables, as a new database, or on another server. The events that were in flight are published
// once, and those of commits that are gone are named.
func TestAWholeDumpIsRestored(t *testing.T) {
	t.Parallel()
	for place, mode := range map[string]string{"the tables": "cdc", "the database": "poll", "another server": "cdc"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			inMode(t, mode, func(t *testing.T, mode string) {
				w := newWorld(t)
				via := testenv.Empty(t)
				r := w.relayIn(mode, "--stream-maxlen=0")
				settled := w.wrote(testenv.LoadOptions{Total: 60, Tag: "settled-"})
				w.oracle.WaitEmpty(t, 20*time.Second)
				tx := w.begin("LOCK TABLE outbox_mark IN SHARE MODE") // nothing is settled
				flying := w.wrote(testenv.LoadOptions{Total: 20, Tag: "flying-"})
				var options, stop []string
				if place == "the tables" {
					options = []string{"--clean"} // it drops what depends on something before it as well
				} else {
					stop = []string{"-v", "ON_ERROR_STOP=1"}
				}
				data := dump(t, w.db, options...)
				must(t, tx.Rollback(t.Context()))
				w.oracle.WaitEmpty(t, 20*time.Second)
				// With these, the gate learns that those in flight are settled.
				gone := w.wrote(testenv.LoadOptions{Total: 60, Tag: "gone-"})
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
					r.waitUnready("foreign_stream")
					w.adopt()
				}
				w.waitMode(mode)
				w.oracle.Others = []*testenv.Load{gone}
				w.all(settled, flying)
				w.has(gone.Committed(), "SELECT count(*) FROM outbox_phantom")
				w.delivers()
			})
		})
	}
}

// After a dump, the original publishes events that it does not settle: the gates cannot distinguish them from those of
// a relay that was killed. The copy names them, because a copy is always compared.
func TestACopyNamesWhatTheOriginalLeftUnsettled(t *testing.T) {
	t.Parallel()
	inMode(t, "cdc", func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode)
		settled := w.wrote(testenv.LoadOptions{Total: 60, Tag: "settled-"})
		w.oracle.WaitEmpty(t, 20*time.Second)
		data := dump(t, w.db)
		tx := w.begin("LOCK TABLE outbox_mark IN SHARE MODE") // nothing is settled
		gone := w.wrote(testenv.LoadOptions{Total: 20, Tag: "gone-"})
		w.waitLen("outbox.order", int64(settled.Committed()+gone.Committed()))
		r.kill()
		must(t, tx.Rollback(t.Context()))

		to := worldOf(t, testenv.NewServer(t).Empty(t), w.redis)
		to.db.Relay = w.db.Relay
		restore(t, to.db, data, "-v", "ON_ERROR_STOP=1")
		r = to.spawn("relay")
		r.waitUnready("foreign_stream")
		to.adopt()
		to.waitMode(mode)
		to.has(gone.Committed(), "SELECT count(*) FROM outbox_phantom")
		to.oracle.Others = []*testenv.Load{gone}
		to.oracle.Check(t, settled, 30*time.Second)
	})
}
