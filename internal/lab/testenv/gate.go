package testenv

import (
	"errors"
	"testing"
	"time"
)

// Gate blocks every statement that inserts into a table, inside Postgres, until it is opened or a limit such as
// statement_timeout ends the statement.
type Gate struct {
	tb testing.TB
	d  *Database
}

// Gate puts a gate into a table of d, once.
func (d *Database) Gate(tb testing.TB, table string) *Gate {
	tb.Helper()
	d.Exec(tb, "CREATE TABLE gate ()")
	d.Exec(tb, `CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		WHILE NOT EXISTS (SELECT FROM gate) LOOP PERFORM pg_sleep(0.01); END LOOP; RETURN NEW; END $$`)
	d.Exec(tb, "CREATE TRIGGER gate BEFORE INSERT ON "+table+" FOR EACH ROW EXECUTE FUNCTION gate()")
	return &Gate{tb, d}
}

// Wait returns when a statement is blocked.
func (g *Gate) Wait() {
	g.tb.Helper()
	Eventually(g.tb, 20*time.Second, func() error {
		if Value[int](g.tb, g.d, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event = 'PgSleep'`) == 0 {
			return errors.New("no statement is at the gate")
		}
		return nil
	})
}

// Open unblocks the statements, and blocks no more.
func (g *Gate) Open() {
	g.tb.Helper()
	g.d.Exec(g.tb, "INSERT INTO gate DEFAULT VALUES")
}
