package main

import (
	"os"
	"strings"
	"testing"

	"posthaste/internal/lab/testenv"
)

// refusals are the functions that a managed server may refuse, and a text of why cdc does not work then; "" where it
// does.
var refusals = map[string]string{
	"pg_control_system":                  "",
	"pg_walfile_name":                    "",
	"pg_current_wal_insert_lsn":          "slot: no_replication_right: read the position of the WAL",
	"pg_current_wal_flush_lsn":           "",
	"pg_wal_lsn_diff":                    "slot: no_replication_right: read the state of slot",
	"pg_get_replication_slots":           "slot: no_replication_right: read the state of slot",
	"pg_create_logical_replication_slot": "slot: no_replication_right: create slot",
	"pg_replication_slot_advance":        "slot: no_replication_right: advance slot",
	"pg_drop_replication_slot":           "",
	"pg_terminate_backend":               "",
	"pg_logical_emit_message":            "",
	"pg_log_standby_snapshot":            "",
	"pg_lock_status":                     "",
	"pg_stat_get_activity":               "",
	"pg_stat_get_wal_senders":            "",
	"pg_stat_get_wal":                    "",
}

// managed returns a world whose relay has the documented rights, and whose server refuses functions.
func managed(t *testing.T, db *testenv.Database, functions ...string) *world {
	t.Helper()
	w := worldOf(t, db, testenv.Redis(t))
	role := "managed_" + db.Relay
	for _, stmt := range []string{
		"CREATE ROLE " + role + " REPLICATION " + testenv.Login(db.URL),
		"GRANT CREATE ON DATABASE " + db.Name + " TO " + role,
		"GRANT CREATE ON SCHEMA public TO " + role,
		"GRANT pg_read_all_stats TO " + role,
	} {
		db.Exec(t, stmt)
	}
	for _, f := range functions {
		for _, stmt := range testenv.Value[[]string](t, db, `SELECT coalesce(array_agg(format(
			'REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC, pg_read_all_stats', oid::regprocedure)), '{}')
			FROM pg_proc WHERE proname = $1 AND pronamespace = 'pg_catalog'::regnamespace`, f) {
			db.Exec(t, stmt)
		}
	}
	w.pgURL = testenv.As(db.URL, role)
	w.once("migrate").says(t, 0)
	return w
}

// Whatever function the server refuses, poll works, and cdc works or reports in one line why it does not.
func TestAManagedServerRefusesAFunction(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/operations.md")
	must(t, err)
	for function, why := range refusals {
		t.Run(function, func(t *testing.T) {
			t.Parallel()
			if !strings.Contains(string(page), "| `"+function+"` |") {
				t.Error("docs/operations.md does not list it")
			}
			w := managed(t, testenv.Empty(t), function)
			w.desire("poll")
			r := w.spawn("relay")
			r.waitReady("")
			w.waitMode("poll")
			w.delivers()
			w.reports(function)
			w.desire("cdc")
			if why == "" {
				w.waitMode("cdc")
			} else {
				r.waitUnready(why)
			}
			w.delivers()
			res := w.once("doctor")
			if (res.code != 0) != (why != "") && function != "pg_drop_replication_slot" {
				t.Errorf("doctor in cdc: exit %d: %s", res.code, res.out)
			}
		})
	}
}

// reports fails unless doctor warns of a refused function, and status works.
func (w *world) reports(function string) {
	w.t.Helper()
	res := w.once("doctor")
	missing := !strings.Contains(res.out, "warn  function "+function+" ") && function != "pg_log_standby_snapshot"
	if res.code != 0 || missing {
		w.t.Errorf("doctor: exit %d: %s%s", res.code, res.out, res.errOut)
	}
	status := w.once("status")
	unnoticed := map[string]string{
		"pg_control_system": "pg_upgrade", "pg_walfile_name": "a failover", "pg_current_wal_insert_lsn": "a failover",
	}[function]
	if status.code != 0 || strings.Contains(status.out, "unnoticed") != (unnoticed != "") ||
		!strings.Contains(status.out, unnoticed) {
		w.t.Errorf("status: exit %d: %s%s", status.code, status.out, status.errOut)
	}
}

// A server without logical WAL may refuse all of them, by a missing right or, like Aurora, by an error.
func TestAManagedServerRefusesAllFunctions(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t, "wal_level=replica")
	all := make([]string, 0, len(refusals))
	for function := range refusals {
		all = append(all, function)
	}
	for name, raise := range map[string]bool{"by right": false, "by an error": true} {
		t.Run(name, func(t *testing.T) {
			db := server.Empty(t)
			refused := all
			if raise {
				refused = nil
				raises(t, db)
			}
			w := managed(t, db, refused...)
			w.desire("poll")
			r := w.spawn("relay")
			r.waitReady("")
			w.waitMode("poll")
			w.delivers()
			for _, text := range []string{"pg_upgrade", "a failover"} {
				for _, command := range []string{"doctor", "status"} {
					w.once(command).says(t, 0, text)
				}
			}
			w.desire("cdc")
			r.waitUnready("slot: ")
			w.delivers()
		})
	}
}

// raises replaces functions by some that raise the error of Aurora.
func raises(t *testing.T, db *testenv.Database) {
	t.Helper()
	conn, err := db.Pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	stmts := []string{"SET allow_system_table_mods = on"}
	for function, returns := range map[string]string{
		"pg_current_wal_insert_lsn()": "pg_lsn", "pg_current_wal_flush_lsn()": "pg_lsn",
		"pg_walfile_name(pg_lsn)": "text", "pg_control_system()": "TABLE (system_identifier bigint)",
	} {
		name, _, _ := strings.Cut(function, "(")
		stmts = append(stmts, "ALTER FUNCTION pg_catalog."+function+" RENAME TO was_"+name,
			"CREATE FUNCTION pg_catalog."+function+" RETURNS "+returns+` LANGUAGE plpgsql AS $$ BEGIN
				RAISE 'wal_level must be set to ''logical''' USING ERRCODE = '55000'; END $$`)
	}
	for _, stmt := range append(stmts, "RESET allow_system_table_mods") {
		_, err := conn.Exec(t.Context(), stmt)
		must(t, err)
	}
}
