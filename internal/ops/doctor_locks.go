package ops

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/statement"
	"posthaste/sql"
)

// lockTimeout is how long a check waits for a lock, and the age from which a lock is reported.
const lockTimeout = 2 * time.Second

// unlessClosed runs checks until the connection is closed: a lock was held for too long, or a query took too long. It
// drops the findings of the interrupted check, and returns false.
func (d *doctor) unlessClosed(conn *pgx.Conn, checks []func()) bool {
	for _, check := range checks {
		before := len(d.findings)
		if check(); conn.IsClosed() {
			d.findings = d.findings[:before]
			return false
		}
	}
	return true
}

// locks names the transactions that block posthaste. answered is false if a check was interrupted.
func (d *doctor) locks(ctx context.Context, conn *pgx.Conn, cfg *pgx.ConnConfig, answered bool) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	omitted := ""
	var err error
	if !answered {
		omitted = "; the later checks of Postgres are left out"
		if conn, err = sql.Connect(ctx, cfg); err == nil {
			defer func() { _ = conn.Close(ctx) }()
		}
	}
	var holders []holder
	if err == nil {
		holders, err = statement.Structs[holder](ctx, conn, "locks", query("doctor_locks"), lockTimeout)
	}
	for _, h := range holders {
		if h.Slot {
			d.warn("locks", "wait for the end of its transaction, or: "+h.Remedy,
				"the relay polls, and creates its slot after the transaction of %s%s", h.Name, omitted)
			continue
		}
		d.fail("locks", "end its transaction: "+h.Remedy, "posthaste waits for a lock that %s holds%s", h.Name, omitted)
	}
	switch {
	case len(holders) > 0:
	case !answered:
		d.fail("locks", "find the statements that block or slow it in pg_stat_activity",
			"a check had no answer in time%s", omitted)
	case err != nil && !sql.Withheld(err):
		d.warn("locks", "let this role read pg_locks and pg_stat_activity", "%v", OneLine(err))
	}
}

// holder is a transaction that blocks posthaste. Slot: only the creation of the slot.
type holder struct {
	Name, Remedy string
	Slot         bool
}

// commits reports commits that wait for a synchronous standby that is absent.
func (d *doctor) commits(ctx context.Context, conn *pgx.Conn) {
	err := sql.CheckCommits(ctx, conn)
	switch {
	case errors.Is(err, sql.ErrCommitsWait):
		d.fail("commits", sql.StandbyRemedy, "%v", err)
	case err != nil:
		d.warn("commits", "let this role read pg_stat_replication", "%v", OneLine(err))
	}
}
