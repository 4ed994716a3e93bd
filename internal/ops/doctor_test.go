package ops_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/ops"
	"posthaste/sql"
)

func at(r *testenv.RedisServer) *redis.UniversalOptions {
	return &redis.UniversalOptions{Addrs: []string{r.Addr()}}
}

func optionsOf(t *testing.T, d *testenv.Database, url string) ops.DoctorOptions {
	t.Helper()
	return ops.DoctorOptions{
		PostgresURL: url, Redis: at(testenv.Redis(t)), Schema: "public", RelayName: d.Relay,
		Slot: "posthaste_" + d.Relay, Publication: "posthaste", WALBudget: 1 << 30, History: time.Hour,
		Restore: time.Hour,
	}
}

// diagnose runs the doctor on a database, without Redis.
func diagnose(t *testing.T, d *testenv.Database, url string) (ok bool, findings map[string]ops.Finding) {
	t.Helper()
	v := ops.Diagnose(t.Context(), optionsOf(t, d, url))
	findings = map[string]ops.Finding{}
	for _, f := range v.Findings {
		findings[f.Check] = f
		if (f.Severity == ops.SeverityOK) != (f.Remedy == "") {
			t.Errorf("%s is %s and has the remedy %q", f.Check, f.Severity, f.Remedy)
		}
	}
	return v.OK, findings
}

// expect reports a finding of another severity, or without a part of the detail. "" is that of no finding.
func expect(t *testing.T, what string, f ops.Finding, severity string, parts ...string) {
	t.Helper()
	if f.Severity != severity {
		t.Errorf("%s: %+v, want %s", what, f, severity)
	}
	testenv.Contains(t, what, f.Detail, parts...)
}

// found returns the findings of some checks.
func found(ctx context.Context, o ops.DoctorOptions, checks ...string) []ops.Finding {
	return slices.DeleteFunc(ops.Diagnose(ctx, o).Findings,
		func(f ops.Finding) bool { return !slices.Contains(checks, f.Check) })
}

// The doctor names what a role that cannot relay lacks, and only warns if an owner lacks optional rights.
func TestDoctorNamesWhatARoleLacks(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	name := "doctor_" + d.Relay
	for _, stmt := range []string{
		"CREATE ROLE " + name + " " + testenv.Login(d.URL),
		"GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO " + name,
		"GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO " + name,
		"INSERT INTO relay_state (name, desired_mode) VALUES ('" + d.Relay + "', 'poll')",
	} {
		d.Exec(t, stmt)
	}
	url := testenv.As(d.URL, name)
	ok, f := diagnose(t, d, url)
	if l := f["table rights"]; ok || l.Severity != ops.SeverityFail ||
		!strings.Contains(l.Detail, "DELETE on outbox,") || !strings.Contains(l.Detail, "DELETE on outbox_mark,") ||
		!strings.Contains(l.Detail, "USAGE on outbox_claim") || strings.Contains(l.Detail, "INSERT") {
		t.Errorf("a writer: ok %v, %+v", ok, l)
	}
	for _, check := range []string{"publication", "statistics right", "replication right"} {
		expect(t, "a writer: "+check, f[check], ops.SeverityWarn)
	}
	// Rights by membership, as a managed service gives them.
	d.Exec(t, `DO $$ BEGIN CREATE ROLE rds_replication; EXCEPTION WHEN duplicate_object THEN END $$`)
	for _, stmt := range []string{
		"GRANT rds_replication TO ", "GRANT pg_read_all_stats TO ",
		"GRANT DELETE, UPDATE ON ALL TABLES IN SCHEMA public TO ", "GRANT USAGE ON SEQUENCE outbox_claim TO ",
	} {
		d.Exec(t, stmt+name)
	}
	ok, f = diagnose(t, d, url)
	if _, lacks := f["table rights"]; !ok || lacks || f["replication right"].Severity != ops.SeverityOK ||
		f["statistics right"].Check != "" {
		t.Errorf("with all grants: ok %v, %+v", ok, f)
	}
	d.Exec(t, "REVOKE SELECT ON posthaste_migrations FROM "+name)
	_, f = diagnose(t, d, url)
	if strings.Contains(f["schema"].Remedy, "migrate") || f["schema"].Severity != ops.SeverityFail {
		t.Errorf("without the right to read the version: %+v", f["schema"])
	}
	d.Exec(t, "INSERT INTO posthaste_migrations (line, version) VALUES ('outbox', 99)")
	_, f = diagnose(t, d, d.URL)
	if strings.Contains(f["schema"].Remedy, "posthaste migrate") || f["schema"].Severity != ops.SeverityFail {
		t.Errorf("a newer schema: %+v", f["schema"])
	}
}

// The doctor names roles that may create objects in the schema, unless they may act as the tables' owner anyway.
func TestDoctorNamesWhoMayCreateInTheSchema(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	own, writer := d.Name+"_own", d.Name+"_writer"
	for _, stmt := range []string{
		"CREATE ROLE " + own, "CREATE ROLE " + writer, "ALTER TABLE outbox OWNER TO " + own,
		"GRANT CREATE ON SCHEMA public TO " + own,
	} {
		d.Exec(t, stmt)
	}
	t.Cleanup(func() {
		_, _ = d.Pool.Exec(context.Background(),
			"DROP OWNED BY "+own+", "+writer+" CASCADE; DROP ROLE "+own+", "+writer)
	})
	_, f := diagnose(t, d, d.URL)
	expect(t, "the tables' owner", f["schema rights"], "")
	for _, c := range []struct{ grant, revoke, named string }{
		{"GRANT CREATE ON SCHEMA public TO PUBLIC", "REVOKE CREATE ON SCHEMA public FROM PUBLIC", "PUBLIC"},
		{"GRANT CREATE ON SCHEMA public TO " + writer, "REVOKE CREATE ON SCHEMA public FROM " + writer, writer},
		{"ALTER DATABASE " + d.Name + " OWNER TO " + writer, "ALTER DATABASE " + d.Name + " OWNER TO postgres", writer},
	} {
		d.Exec(t, c.grant)
		ok, f := diagnose(t, d, d.URL)
		got := f["schema rights"]
		if ok || got.Severity != ops.SeverityFail || !strings.HasPrefix(got.Detail, c.named+" ") {
			t.Errorf("%s: ok %v, %+v", c.grant, ok, got)
		}
		d.Exec(t, c.revoke)
	}
}

// A Postgres that hangs does not use up the time of Redis, which is checked and found healthy.
func TestDoctorLooksAtRedisBesideAPostgresThatHangs(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	tx, err := d.Pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), "LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Second)
	defer cancel()
	if f := found(ctx, optionsOf(t, d, d.URL), "redis"); len(f) != 1 || f[0].Severity != ops.SeverityOK {
		t.Errorf("findings: %+v", f)
	}
}

// The doctor checks that unsettled events can be found, and that expired ones are deleted.
func TestDoctorLooksAtTheLog(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	marks := func() ops.Finding {
		t.Helper()
		_, f := diagnose(t, d, d.URL)
		return f["marks"]
	}
	expect(t, "a new log", marks(), ops.SeverityOK, "nothing is settled")
	// One mark older than the retention is kept per part, whatever its age.
	d.Exec(t, `DELETE FROM outbox_mark; INSERT INTO outbox_mark (part, epoch, settled, hi, at)
		SELECT n, 1, '3:3:', 0, '2026-03-01 12:00Z' FROM generate_series(-1, 15) n`)
	expect(t, "a quiet log", marks(), ops.SeverityOK, "of 2026-03-01T12:00:00Z")
	d.Exec(t, `INSERT INTO outbox_mark (part, epoch, settled, hi, at)
		SELECT n, 1, '3:3:', 0, '2026-03-01 13:00Z' FROM generate_series(-1, 2) n`)
	expect(t, "a log that nobody shortens", marks(), ops.SeverityWarn, "and 4 are left")
	// Manual changes.
	d.Exec(t, "DROP INDEX outbox_owed; ALTER SEQUENCE outbox_seq_seq CACHE 50")
	d.Exec(t, "ALTER TABLE outbox DISABLE TRIGGER USER")
	remedies := remediesOf(ops.Diagnose(t.Context(), optionsOf(t, d, d.URL)), "table")
	for i, want := range []string{"ENABLE TRIGGER USER", "posthaste migrate", "REINDEX INDEX outbox_owed"} {
		if len(remedies) != 3 || !strings.Contains(remedies[i], want) {
			t.Errorf("a table that was changed: %q, want %s", remedies, want)
		}
	}
}

// remediesOf returns the remedies of a check's problems, of all if check is "". A lock that only delays is one.
func remediesOf(v ops.Diagnosis, check string) (list []string) {
	for _, f := range v.Findings {
		if (f.Severity == ops.SeverityFail || f.Check == "locks") && (check == "" || f.Check == check) {
			list = append(list, f.Remedy)
		}
	}
	return list
}

// The doctor names a transaction that keeps it, or a relay, from a table, and reports no other problem then.
func TestDoctorNamesBlockingTransactions(t *testing.T) {
	t.Parallel()
	pg := testenv.NewServer(t, "max_prepared_transactions=2", "wal_level=logical")
	const row, end = "SELECT FROM relay_state FOR UPDATE", "end its transaction: "
	const terminate = "SELECT pg_terminate_backend("
	prepared := func(id string) string { return end + "COMMIT PREPARED '" + id + "', or ROLLBACK" }
	t.Run("locks", func(t *testing.T) {
		for name, c := range map[string]blocking{
			"marks":            {[]string{"LOCK outbox_mark"}, "", end + terminate},
			"state":            {[]string{"LOCK relay_state"}, "", end + terminate},
			"outbox":           {[]string{"LOCK outbox"}, row, end + terminate},
			"row":              {[]string{row}, row, end + terminate},
			"outbox, prepared": {[]string{"LOCK outbox", "PREPARE TRANSACTION 'a''b'"}, "", prepared("a''b")},
			"row, prepared":    {[]string{row, "PREPARE TRANSACTION 'a''c'"}, row, prepared("a''c")},
		} {
			t.Run(name, func(t *testing.T) { t.Parallel(); c.isNamed(t, pg.Database(t)) })
		}
	})
	// Every transaction of the server keeps a slot from being made.
	slot := blocking{
		[]string{"SELECT pg_current_xact_id()"},
		"SELECT pg_catalog.pg_create_logical_replication_slot('waits', 'pgoutput', true)",
		"wait for the end of its transaction, or: " + terminate,
	}
	slot.isNamed(t, pg.Database(t))
}

// blocking is a transaction that holds something, what a relay executes, and the only remedy.
type blocking struct {
	holds          []string
	awaits, remedy string
}

func (c blocking) isNamed(t *testing.T, d *testenv.Database) {
	t.Helper()
	must(t, sql.Register(t.Context(), d.Pool, d.Relay))
	connect := func(application string) *pgx.Conn {
		t.Helper()
		cfg, err := pgx.ParseConfig(d.URL)
		must(t, err)
		cfg.RuntimeParams["application_name"] = application
		conn, err := pgx.ConnectConfig(t.Context(), cfg)
		must(t, err)
		return conn
	}
	other, relay := connect("a migration"), connect("posthaste relay")
	for _, stmt := range append([]string{"BEGIN"}, c.holds...) {
		_, err := other.Exec(t.Context(), stmt)
		must(t, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		if c.awaits != "" {
			_, _ = relay.Exec(ctx, c.awaits)
		}
	}()
	remedies := func() []string { return remediesOf(ops.Diagnose(t.Context(), optionsOf(t, d, d.URL)), "") }
	testenv.Eventually(t, 20*time.Second, func() error { // a transaction is reported after 2 s
		got := remedies()
		return testenv.FailIf(len(got) != 1 || !strings.HasPrefix(got[0], c.remedy), "%v: %q", c.holds, got)
	})
	cancel()
	<-waited
	_ = other.Close(t.Context())
	_ = relay.Close(t.Context())
	if last := c.holds[len(c.holds)-1]; strings.HasPrefix(last, "PREPARE ") {
		d.Exec(t, strings.Replace(last, "PREPARE TRANSACTION", "ROLLBACK PREPARED", 1))
	}
	if got := remedies(); len(got) != 0 {
		t.Errorf("without locks: %q", got)
	}
}

// The doctor names settings with which no write, or no commit, ends.
func TestDoctorNamesRefusedWrites(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t, "wal_level=logical").Database(t)
	d.Exec(t, "ALTER DATABASE "+d.Name+" SET default_transaction_read_only = on")
	d.Standby(t, "absent")
	testenv.Eventually(t, 10*time.Second, func() error {
		_, f := diagnose(t, d, d.URL)
		return testenv.FailIf(f["commits"].Severity != ops.SeverityFail ||
			f["commits"].Remedy != sql.StandbyRemedy || f["read only"].Severity != ops.SeverityFail, "%+v", f)
	})
}

// The doctor fails, with one finding, if the user of Redis lacks a command that publishing needs, or the key of one
// stream.
func TestDoctorNamesMissingRightsInRedis(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	must(t, sql.Register(t.Context(), d.Pool, d.Relay))
	d.Exec(t, `INSERT INTO outbox_stream (stream, base, adopted_epoch)
		SELECT s, s, 0 FROM unnest('{outbox.order,outbox.secret}'::text[]) s`)
	o := optionsOf(t, d, d.URL)
	o.Redis = &redis.UniversalOptions{Addrs: []string{r.Addr()}, Username: "relay", Password: "x"}
	for rule, problems := range map[string]int{
		"+@all": 0, "-xadd": 1, "-evalsha": 1, "resetkeys ~outbox.order ~{outbox.order}:* ~{posthaste*}:*": 1,
	} {
		args := []any{"ACL", "SETUSER", "relay", "reset", "on", ">x", "~*", "+@all"}
		for _, word := range strings.Fields(rule) {
			args = append(args, word)
		}
		must(t, r.Client.Do(t.Context(), args...).Err())
		v := ops.Diagnose(t.Context(), o)
		if got := remediesOf(v, "redis rights"); len(got) != problems {
			t.Errorf("%s: %+v", rule, v.Findings)
		}
	}
}

// Losses of Redis cannot be restored without history, and are not restored with --restore=off. A process that only
// writes does not report that.
func TestDoctorSaysWhatIsNotRestored(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	for _, c := range []struct {
		history, restore time.Duration
		writer           bool
		check, detail    string
	}{
		{time.Hour, time.Hour, false, "", ""},
		{0, time.Hour, false, "history", "neither counted nor restored"},
		{0, 0, false, "history", "neither counted nor restored"},
		{time.Hour, 0, false, "restore", "an operator must replay them"},
		{0, 0, true, "", ""},
	} {
		o := optionsOf(t, d, d.URL)
		o.History, o.Restore, o.WriterOnly = c.history, c.restore, c.writer
		f := found(t.Context(), o, "history", "restore")
		switch {
		case c.check == "" && len(f) == 0:
		case len(f) != 1 || f[0].Check != c.check || f[0].Severity != ops.SeverityWarn ||
			!strings.Contains(f[0].Detail, c.detail):
			t.Errorf("%+v: %+v", c, f)
		}
	}
}

// A finding that all nodes of a cluster share is reported once, others with the node's address. A master that is down
// is a problem that names it.
func TestDoctorLooksAtEveryNode(t *testing.T) {
	t.Parallel()
	d, c := testenv.Postgres(t), testenv.Cluster(t, 3, 1)
	o := optionsOf(t, d, d.URL)
	o.Redis = &redis.UniversalOptions{IsClusterMode: true}
	for _, n := range c.Nodes {
		o.Redis.Addrs = append(o.Redis.Addrs, n.Addr())
	}
	replica := c.Nodes[4]
	must(t, c.Do(t.Context(), 4, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru"))
	find := func(check string) []ops.Finding { return found(t.Context(), o, check) }
	if f := find("redis cluster"); len(f) != 1 || f[0].Severity != ops.SeverityOK ||
		f[0].Detail != "3 masters and 3 replicas" {
		t.Errorf("cluster: %+v", f)
	}
	if f := find("redis persistence"); len(f) != 1 || strings.Contains(f[0].Detail, "node ") {
		t.Errorf("persistence: %+v", f)
	}
	f := find("redis eviction")
	if len(f) != 2 || !slices.ContainsFunc(f, func(f ops.Finding) bool {
		return f.Severity == ops.SeverityWarn && strings.HasPrefix(f.Detail, "node "+replica.Addr()+": ")
	}) {
		t.Errorf("eviction: %+v", f)
	}
	must(t, replica.Kill())
	if f := find("redis"); !slices.ContainsFunc(f, func(f ops.Finding) bool {
		return f.Severity == ops.SeverityWarn && strings.Contains(f.Detail, replica.Addr())
	}) {
		t.Errorf("a replica is down: %+v", f)
	}
	for _, i := range []int{1, 4} { // without a replica that replaces it
		_ = c.Nodes[i].Kill()
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		f := find("redis")
		if len(f) != 1 || f[0].Severity != ops.SeverityFail || !strings.Contains(f[0].Detail, c.Nodes[1].Addr()) {
			return fmt.Errorf("a master is down: %+v", f)
		}
		return nil
	})
}

// The doctor names a session that holds the leader's lock and is no relay's.
func TestDoctorNamesWhoHoldsTheLeadersLock(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	_, f := diagnose(t, d, d.URL)
	expect(t, "nobody leads", f["leader"], "")
	d.Strand(t)
	ok, f := diagnose(t, d, d.URL)
	testenv.Equal(t, "somebody else leads, and the relay can run", ok, false)
	expect(t, "somebody else leads", f["leader"], ops.SeverityFail, "is no relay")
}

// If the balances in Redis are another database's, credits are refused until an operator decides.
func TestDoctorNamesTheBalancesOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	must(t, sql.Register(t.Context(), d.Pool, d.Relay))
	r.Client.Set(t.Context(), "{cr:owner}", "another", 0)
	o := optionsOf(t, d, d.URL)
	o.Redis = at(r)
	for _, want := range []string{ops.SeverityWarn, ops.SeverityFail} { // without credits of its own, and with some
		f := found(t.Context(), o, "credit balances")
		if len(f) != 1 || f[0].Severity != want || f[0].Remedy != credits.ForeignRemedy ||
			!strings.Contains(f[0].Detail, "another") {
			t.Errorf("%+v, want %s", f, want)
		}
		d.Exec(t, "INSERT INTO credit_epoch (bucket) VALUES (1) ON CONFLICT DO NOTHING")
	}
}

// The slots of others fail the doctor if none is left for the relay. The relay's own slot does not.
func TestDoctorNamesAMissingSlot(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t, "max_replication_slots=1").Database(t)
	create := "SELECT pg_create_logical_replication_slot($1, 'pgoutput')"
	own := "posthaste_" + d.Relay
	d.Exec(t, create, own)
	_, f := diagnose(t, d, d.URL)
	expect(t, "with its own slot", f["max_replication_slots"], "")
	d.Exec(t, "SELECT pg_drop_replication_slot($1)", own)
	d.Exec(t, create, "other")
	ok, f := diagnose(t, d, d.URL)
	testenv.Equal(t, "without a slot the relay can run", ok, false)
	expect(t, "with the slot of another", f["max_replication_slots"], ops.SeverityFail, "1 of 1")
	d.Exec(t, "INSERT INTO relay_state (name, desired_mode) VALUES ($1, 'poll')", d.Relay)
	if ok, f := diagnose(t, d, d.URL); !ok || f["max_replication_slots"].Severity != ops.SeverityWarn {
		t.Errorf("in mode poll: ok %v, %+v", ok, f["max_replication_slots"])
	}
}
