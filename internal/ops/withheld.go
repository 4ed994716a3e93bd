package ops

import (
	"context"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
	"posthaste/sql"
)

// What is not noticed on a server that refuses its identifier or its timeline.
const (
	copyUnnoticed     = "an upgrade by pg_upgrade looks like the original, even while the original runs"
	failoverUnnoticed = "a failover looks like a restart: after each, all streams are compared with the log, and " +
		"lost commits are noticed only if the gates in Redis show them"
)

// unnoticed returns what the owner in st cannot notice.
func unnoticed(st outbox.State) (list []string) {
	if st.Owner.Epoch > 0 && st.System == 0 {
		list = append(list, copyUnnoticed)
	}
	if st.Timeline < 0 {
		list = append(list, failoverUnnoticed)
	}
	return list
}

// withheld are the functions that a managed server may refuse, in the order of docs/operations.md.
var withheld = []struct {
	function string
	// lost is what does not work without it.
	lost string
	// cdc reports whether a stream needs it.
	cdc bool
	// call is a call without effects, for servers that refuse a function although the role has the right.
	call string
}{
	{function: "pg_control_system", lost: copyUnnoticed, call: "SELECT FROM pg_catalog.pg_control_system()"},
	{function: "pg_walfile_name", lost: failoverUnnoticed},
	{
		function: "pg_current_wal_insert_lsn", lost: "cdc does not work; " + failoverUnnoticed, cdc: true,
		call: "SELECT pg_current_wal_insert_lsn()",
	},
	{
		function: "pg_current_wal_flush_lsn", lost: "a stream that does not move is not noticed",
		call: "SELECT pg_current_wal_flush_lsn()",
	},
	{function: "pg_wal_lsn_diff", lost: "cdc does not work", cdc: true},
	{function: "pg_get_replication_slots", lost: "cdc does not work, and slots are not shown", cdc: true},
	{function: "pg_create_logical_replication_slot", lost: "cdc does not work", cdc: true},
	{function: "pg_replication_slot_advance", lost: "cdc does not work", cdc: true},
	{function: "pg_drop_replication_slot", lost: "a slot beyond its WAL budget is not dropped", cdc: true},
	{function: "pg_terminate_backend", lost: "a session that holds the slot, or the leader's lock, is not ended"},
	{function: "pg_logical_emit_message", lost: "with synchronous_standby_names, nothing is settled"},
	{function: "pg_lock_status", lost: "a session that holds the leader's lock and is no relay is not found"},
	{function: "pg_stat_get_activity", lost: "such a session is not named, and relays are not counted"},
	{function: "pg_stat_get_wal_senders", lost: "doctor does not count walsenders"},
	{
		function: "pg_stat_get_wal", lost: "doctor cannot say how fast WAL is written",
		call: "SELECT FROM pg_catalog.pg_stat_get_wal()",
	},
}

// refusals reports the functions that the server refuses.
func (d *doctor) refusals(ctx context.Context, conn *pgx.Conn) {
	denied := map[string]bool{}
	rows, err := conn.Query(ctx, query("doctor_functions"))
	if err == nil {
		var name string
		_, err = pgx.ForEachRow(rows, []any{&name}, func() error {
			denied[name] = true
			return nil
		})
	}
	if err != nil {
		d.warn("functions", "let this role read pg_proc", "cannot be read: %v", OneLine(err))
		return
	}
	for _, f := range withheld {
		refused := denied[f.function]
		if !refused && f.call != "" {
			_, err := conn.Exec(ctx, f.call)
			refused = sql.Withheld(err)
		}
		if !refused {
			continue
		}
		severity, remedy := SeverityWarn, "GRANT EXECUTE ON FUNCTION "+f.function+", if the service permits it"
		if f.cdc && d.desired != outbox.ModePoll {
			severity, remedy = SeverityFail, remedy+"; or posthaste mode poll"
		}
		d.add(severity, "function "+f.function, remedy, "refused: %s", f.lost)
	}
}
