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
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(d.URL)
	if err != nil {
		t.Fatal(err)
	}
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
			settled := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 60, Tag: "settled-"})
			settled.Wait()
			w.waitSettled(int64(settled.Committed()))
			r.kill()
			pending := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 60, Tag: "pending-"})
			pending.Wait()

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
			r.waitReady(t, http.StatusServiceUnavailable, "foreign_stream")
			to.adopt()
			to.waitMode("cdc", 30*time.Second)
			to.oracle.Others = []*testenv.Load{settled}
			to.oracle.Check(t, pending, 30*time.Second)
			to.oracle.Others = []*testenv.Load{pending}
			to.oracle.Check(t, settled, 30*time.Second)
			to.oracle.Others = []*testenv.Load{settled, pending}
			to.delivers()
			to.calm()
		})
	}
}
